"""Layouts drawn at random, one after the other, with a line for each and JSON for machines: `make verify-matrix`.

`--covering` takes those that cover every pair of choices instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.ranks import RankPool
from tests.verification.covering import Choices, covering, named, tables_of, world_of
from tests.verification.layouts import corpus, verified
from tests.verification.random_layouts import drawn, tables_of_foreign

TIMEOUT_S = 180.0


def main() -> int:
    """The exit code: 0, or 6 where a layout is not the same model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=150, help="layouts")
    parser.add_argument("--first", type=int, default=0, help="how many of them to pass over")
    parser.add_argument("--covering", action="store_true", help="layouts that cover every pair of choices")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-matrix-") as folder:
        corpus(Path(folder))
        pool = RankPool()
        try:
            layouts = covering(arguments.number) if arguments.covering else drawn(arguments.number)
            rows = [_row(pool, choices, folder, arguments.steps) for choices in layouts[arguments.first :]]
        finally:
            pool.close()
    failed = [row for row in rows if not row["passed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} layouts are the same model")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"matrix": rows}, indent=1) + "\n")
    return 6 if failed else 0


def _row(pool: RankPool, choices: Choices, folder: str, steps: int) -> dict[str, Any]:
    begin_s = time.perf_counter()
    tables = tables_of_foreign(choices) if "foreign" in choices else tables_of(choices)
    outcomes = pool.outcomes(world_of(choices), verified, tables, folder, choices["exact"], steps, timeout_s=TIMEOUT_S)
    errors = [f"rank {rank}: {value}" for rank, (worked, value) in enumerate(outcomes) if not worked]
    verdict = None if errors else outcomes[0][1]
    passed = verdict is not None and verdict["holds"]
    said = errors[0].strip().splitlines()[-1] if errors else verdict["sentence"]
    print(f"{'ok ' if passed else '!! '} {named(choices)}{'' if passed else ': ' + said}", flush=True)
    rows = [] if verdict is None else verdict["rows"]
    worst = max((row["difference"] / row["tolerance"] for row in rows), default=None)
    return {
        "layout": choices,
        "ranks": world_of(choices),
        "passed": passed,
        "worst_share_of_tolerance": worst,
        "seconds": round(time.perf_counter() - begin_s, 2),
        "said": said,
    }


if __name__ == "__main__":
    sys.exit(main())
