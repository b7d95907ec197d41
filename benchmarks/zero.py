"""`python -m benchmarks.zero`: steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a `fully_shard` script.

All sides train the same model in the same loop. Each peer is measured a second time (A/A, the sides that end in
`_again`), which shows what noise alone does to a ratio.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from torch._C._distributed_c10d import Store

from benchmarks.command import run
from benchmarks.zero_scripts import ShardedScript, ZeroScript
from shoal.bench.ddp_script import Script, new_gpt
from shoal.bench.groups import Sides, interleaved, join_default_group, join_group, join_mesh, join_store
from shoal.bench.options import FEWEST_PAIRS, AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import (
    Result,
    Turns,
    again_cells,
    check,
    columns,
    lower_bound,
    milliseconds,
    print_report,
    ratios,
)
from shoal.bench.training_job import SEQUENCE, corpus_file
from shoal.launcher.environment import Place
from shoal.topology.layout import Layout

PEERS = {"zero_1": ("ddp", 0.97), "zero_2": ("ddp", 0.97), "zero_3": ("fully_shard", 1.0)}
"""The peer of each stage, and what is promised of the 95 % bound of the ratio to it."""
AGAIN = "_again"


def zero(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Paired steps.", min=6)] = FEWEST_PAIRS,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a hand-written fully_shard script.

    Example: python -m benchmarks.zero --pairs 20
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, tokens=tokens, pairs=pairs))
        return
    command = ["benchmarks.zero", "--tokens", str(tokens), "--pairs", str(pairs)]
    print_report("zero", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, tokens: int, pairs: int) -> Result | None:
    """A row and a check for each stage, for `tokens` of a rank and step; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        join_default_group(place, store, stack)
        clock = join_group("clock", place, store)
        sides = _sides(place, store, corpus_file(folder), tokens)
        always = [name for name in sides if not name.endswith(AGAIN)]
        turns = interleaved(sides, clock, pairs=pairs, always=always)
    return _result(turns, tokens=tokens, ranks=place.world_size) if place.rank == 0 else None


def _sides(place: Place, store: Store, corpus: Path, tokens: int) -> Sides:
    mesh = join_mesh(Layout(shard=place.world_size), place, store)
    sizes = {"samples": tokens // SEQUENCE, "sequence": SEQUENCE}
    scripts: dict[str, Script | ShardedScript | ZeroScript] = {
        name: Script(new_gpt(), corpus, rank=place.rank, distributed=True, **sizes) for name in ("ddp", "ddp" + AGAIN)
    }
    scripts |= {
        name: ShardedScript(new_gpt(), corpus, rank=place.rank, world_size=place.world_size, **sizes)
        for name in ("fully_shard", "fully_shard" + AGAIN)
    }
    scripts |= {f"zero_{stage}": ZeroScript(new_gpt(), corpus, mesh, zero=stage, **sizes) for stage in (1, 2, 3)}
    return {name: script.step for name, script in scripts.items()}


def _result(turns: Turns, *, tokens: int, ranks: int) -> Result:
    times = columns(turns)
    rows: list[dict[str, Any]] = []
    checks = []
    for side, (peer, bound) in PEERS.items():
        gained = ratios(turns, side, peer=peer)
        rows.append(
            {
                "stage": side,
                "peer": peer,
                "tokens_per_rank": tokens,
                "ranks": ranks,
                "pairs": len(gained),
                **milliseconds({side: times[side], peer: times[peer]}),
                "ratio_median": round(statistics.median(gained), 4),
                "ratio_lower_95": round(lower_bound(gained), 4),
                **again_cells(ratios(turns, peer + AGAIN, peer=peer)),
            }
        )
        checks.append(check(f"{side} against {peer}, 95 % bound, {tokens} tokens a rank", lower_bound(gained), bound))
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(zero)
