"""`python -m benchmarks.recipes`: trains every recipe, and prints what it reached beside the figure in its head.

A run file of `recipes/` with a figure says it in its head:

    # Figure: accuracy/eval >= 0.96

Runs go to a temporary folder, so that each starts from its first step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from shoal.bench.options import AsJson, names
from shoal.bench.report import check, merged, print_report
from shoal.errors import EnvironmentFault
from shoal.observe.events import read_events

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r"^# Figure: (\S+) (<=|>=) (\S+?)\.?$", re.MULTILINE)
LONGEST_S = 180.0
"""Promised of each recipe on two cores."""
BASES = {"lora": "lora-base"}
"""A recipe that begins with the weights of another, which is trained and exported first."""


def figures() -> dict[str, tuple[str, str, float]]:
    """By the name of each run file with a figure: the measurement, ">=" or "<=", and the number."""
    found = {}
    for file in sorted((ROOT / "recipes").glob("*.toml")):
        if (match := FIGURE.search(file.read_text())) is not None:
            found[file.stem] = (match[1], match[2], float(match[3]))
    return found


def recipes(
    only: Annotated[str, typer.Option(help="Names of run files in recipes/, with commas. Default: all.")] = "",
    processes: Annotated[int, typer.Option(help="Ranks of one thread; the global batch is the same.", min=1)] = 2,
    as_json: AsJson = False,
) -> None:
    """Trains the recipes, and says which of them reach the figure in the head of their run file.

    Example: python -m benchmarks.recipes --only vit,encoder
    """
    wanted = names(only, "--only", figures())
    with tempfile.TemporaryDirectory(prefix="shoal-recipes-") as folder:
        results = [_trained(name, Path(folder), processes=processes) for name in wanted]
    print_report("recipes", merged(results), as_json=as_json)


def _trained(name: str, folder: Path, *, processes: int) -> dict[str, list[dict[str, Any]]]:
    measurement, relation, bound = figures()[name]
    begin_s = time.perf_counter()
    overrides = []
    if (base := BASES.get(name)) is not None:
        _shoal("train", f"recipes/{base}.toml", *_place(folder / base, processes))
        _shoal("checkpoint", "export", str(folder / base), str(folder / "model"), "--to", "huggingface")
        overrides = [f'model.folder="{folder / "model"}"']
    _shoal("train", f"recipes/{name}.toml", *_place(folder / name, processes), *overrides)
    took_s = time.perf_counter() - begin_s
    values = [value for event in read_events(folder / name) if (value := event.get(measurement)) is not None]
    row = {
        "recipe": name,
        "ranks": processes,
        "measurement": measurement,
        "reached": round(values[-1], 4),
        "figure": f"{relation} {bound:g}",
        "seconds": round(took_s, 1),
    }
    return {
        "rows": [row],
        "checks": [
            check(f"{name}: {measurement}", values[-1], bound, at_most=relation == "<="),
            check(f"{name}: seconds, its start included", took_s, LONGEST_S, at_most=True),
        ],
    }


def _place(directory: Path, processes: int) -> list[str]:
    return [f'run.directory="{directory}"', f"run.processes={processes}"]


def _shoal(*arguments: str) -> None:
    """Raises `EnvironmentFault` where the command fails."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *arguments], cwd=ROOT, env=environ, stdout=sys.stderr, check=False
    )
    if done.returncode != 0:
        raise EnvironmentFault(
            f"shoal {' '.join(arguments)} ended with exit code {done.returncode}; its error is above"
        )


if __name__ == "__main__":
    run(recipes)
