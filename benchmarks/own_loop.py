"""`python -m benchmarks.own_loop`: a script's own loop on Shoal beside `shoal train` and beside other libraries.

All sides train the same model with the same optimizer (`benchmarks.loop_scripts`); every rank holds all of them, and
takes their steps in turn. A measured step follows a step of the same side, as in training. `shoal train` is measured a
second time (A/A), which shows what noise alone does to a ratio. A peer that cannot be imported is left out, and named.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from benchmarks.loop_scripts import Setting, Step, accelerate, ddp, deepspeed, fabric
from benchmarks.loop_scripts import own_loop as own
from shoal.bench.groups import interleaved, join_default_group, join_group, join_store
from shoal.bench.options import AsJson, Processes, names, token_counts
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import (
    Result,
    Turns,
    again_cells,
    check,
    columns,
    lower_bound,
    merged,
    milliseconds,
    print_report,
    ratios,
)
from shoal.bench.training_job import SEQUENCE, corpus_file, gpt_run_file, start_training, training_job
from shoal.engine.loop import take_step
from shoal.launcher.environment import Place

TRAIN, TRAIN_AGAIN, OWN = "shoal_train", "shoal_train_again", "own_loop"
WITHIN = 0.99
"""Promised of the 95 % bound of the own loop's ratio to `shoal train`."""
PEERS: dict[str, tuple[str, Callable[[Setting], Step], str]] = {
    "ddp": ("torch", ddp, OWN),
    "accelerate": ("accelerate", accelerate, OWN),
    "fabric": ("lightning_fabric", fabric, OWN),
    "deepspeed_zero_1": ("deepspeed", partial(deepspeed, stage=1), "own_zero_1"),
    "deepspeed_zero_3": ("deepspeed", partial(deepspeed, stage=3), "own_zero_3"),
}
"""The package of each peer, its script, and the side of Shoal's that it is compared with."""
OWN_SIDES: dict[str, Callable[[Setting], Step]] = {
    OWN: own,
    "own_zero_1": partial(own, zero=1),
    "own_zero_3": partial(own, zero=3),
}


def own_loop(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    pairs: Annotated[int, typer.Option(help="Turns of all sides.", min=6)] = 40,
    peers: Annotated[
        str, typer.Option(help="Of ddp, accelerate, fabric, deepspeed_zero_1, deepspeed_zero_3, or none. Default: all.")
    ] = "",
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """A script's own loop on Shoal beside `shoal train`, DDP, Accelerate, Fabric and DeepSpeed.

    Example: python -m benchmarks.own_loop --tokens 256 --pairs 20 --peers ddp,accelerate
    """
    sizes = token_counts(tokens)
    chosen = [] if peers == "none" else names(peers, "--peers", PEERS)
    if is_rank():
        run_as_rank(lambda place: measure(place, chosen, tokens=sizes[0], pairs=pairs))
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # what peers call is deprecated in newer torch
    there = [name for name in chosen if importlib.util.find_spec(PEERS[name][0]) is not None]
    for name in chosen:
        if name not in there:
            typer.echo(f"{name} is left out: pip install {PEERS[name][0].replace('_', '-')}", err=True)
    command = ["benchmarks.own_loop", "--pairs", str(pairs), "--peers", ",".join(there) or "none"]
    results = [on_ranks([*command, "--tokens", str(size)], processes=processes) for size in sizes]
    print_report("own_loop", merged(results), as_json=as_json)


def measure(place: Place, peers: Sequence[str], *, tokens: int, pairs: int) -> Result | None:
    """A row and a check for each pair of sides, for `tokens` of a rank and step; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        corpus, store = corpus_file(folder), join_store(place)
        os.environ.update(ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu")
        join_default_group(place, store, stack)
        setting = Setting(place, store, stack, folder, corpus, samples=tokens // SEQUENCE)
        sides: dict[str, Callable[[], Any]] = {name: _trained(setting, name) for name in (TRAIN, TRAIN_AGAIN)}
        sides |= {name: OWN_SIDES[name](setting) for name in sorted({OWN, *(PEERS[peer][2] for peer in peers)})}
        sides |= {name: PEERS[name][1](setting) for name in peers}
        clock = join_group("clock", place, store)
        turns = interleaved(sides, clock, pairs=pairs, always=sorted(sides), warm=True)
    return _result(turns, peers, tokens=tokens, ranks=place.world_size) if place.rank == 0 else None


def _trained(setting: Setting, name: str) -> Callable[[], Any]:
    """The body of the loop of `shoal train`."""
    (folder := setting.folder / name).mkdir()
    run_file = gpt_run_file(folder, setting.corpus, setting.samples * SEQUENCE * setting.place.world_size)
    training = start_training(run_file, setting.place, setting.stack, store=PrefixStore(name, setting.store))
    return partial(take_step, training_job(training, folder, setting.stack))


def _result(turns: Turns, peers: Sequence[str], *, tokens: int, ranks: int) -> Result:
    times = columns(turns)
    again = again_cells(ratios(turns, TRAIN_AGAIN, peer=TRAIN))
    rows, checks = [], []
    for peer in (TRAIN, *peers):
        side = OWN if peer == TRAIN else PEERS[peer][2]
        gained = ratios(turns, side, peer=peer)
        (own_ms,) = milliseconds({side: times[side]}).values()
        (peer_ms,) = milliseconds({peer: times[peer]}).values()
        rows.append(
            {
                "side": side,
                "peer": peer,
                "tokens_per_rank": tokens,
                "ranks": ranks,
                "pairs": len(gained),
                "side_ms": own_ms,
                "peer_ms": peer_ms,
                "ratio_median": round(statistics.median(gained), 4),
                "ratio_lower_95": round(lower_bound(gained), 4),
                **again,
            }
        )
        what = f"{side} against {peer}, 95 % bound, {tokens} tokens a rank"
        checks.append(check(what, lower_bound(gained), WITHIN if peer == TRAIN else 1.0))
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(own_loop)
