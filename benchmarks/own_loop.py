"""`python -m benchmarks.own_loop`: a script's own loop on Shoal beside `shoal train` and beside other libraries.

All sides train the same model with the same optimizer (`benchmarks.loop_scripts`): a GPT, or with `--model` what others
have written (`benchmarks.models_of_others`). Every rank holds all of them, and takes their steps in turn. A measured
step follows a step of the same side, as in training. `shoal train` is measured a second time (A/A), which shows what
noise alone does to a ratio. What cannot be imported is left out, and named.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from benchmarks.loop_scripts import Setting, Step, accelerate, ddp, deepspeed, fabric, fsdp2, plain
from benchmarks.loop_scripts import own_loop as own
from benchmarks.models_of_others import MODELS
from shoal.assembly.objects import UserObjects
from shoal.bench.groups import interleaved, join_default_group, join_group, join_store
from shoal.bench.options import AsJson, names, token_counts
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
    "fsdp2": ("torch", fsdp2, "own_zero_3"),
    "plain": ("torch", plain, OWN),
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
    model: Annotated[
        str, typer.Option(help="In the place of the GPT: one of benchmarks.models_of_others, several with commas; all.")
    ] = "",
    pairs: Annotated[int, typer.Option(help="Turns of all sides.", min=6)] = 40,
    peers: Annotated[
        str, typer.Option(help=f"Of {', '.join(PEERS)}, or none. Default: all but plain.")
    ] = "ddp,fsdp2,accelerate,fabric,deepspeed_zero_1,deepspeed_zero_3",
    processes: Annotated[int, typer.Option(help="Ranks of one thread.", min=1)] = 2,
    as_json: AsJson = False,
) -> None:
    """A script's own loop on Shoal beside `shoal train`, DDP, FSDP2, Accelerate, Fabric and DeepSpeed.

    Example: python -m benchmarks.own_loop --tokens 256 --pairs 20 --peers ddp,accelerate
    """
    chosen = [] if peers == "none" else names(peers, "--peers", PEERS)
    models = names("" if model == "all" else model, "--model", MODELS) if model else []
    if is_rank():
        size = 0 if models else token_counts(tokens)[0]
        run_as_rank(lambda place: measure(place, chosen, model=model, tokens=size, pairs=pairs))
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")  # what peers call is deprecated in newer torch
    there = _installed(chosen, {name: PEERS[name][0] for name in chosen})
    models = _installed(models, {name: MODELS[name].needs for name in models})
    command = ["benchmarks.own_loop", "--pairs", str(pairs), "--peers", ",".join(there) or "none"]
    loads = [["--model", name] for name in models] if model else [["--tokens", str(t)] for t in token_counts(tokens)]
    results = [on_ranks([*command, *load], processes=processes) for load in loads]
    print_report("own_loop", merged(results), as_json=as_json)


def _installed(chosen: Sequence[str], packages: Mapping[str, str]) -> list[str]:
    """Those whose packages are there; says which are not."""
    there = [name for name in chosen if importlib.util.find_spec(packages[name]) is not None]
    for name in chosen:
        if name not in there:
            typer.echo(f"{name} is left out: pip install {packages[name].replace('_', '-')}", err=True)
    return there


def measure(place: Place, peers: Sequence[str], *, model: str, tokens: int, pairs: int) -> Result | None:
    """A row and a check for each pair of sides; None on all ranks but rank 0. `model` is trained, or for "" the GPT
    with `tokens` of a rank and step.
    """
    other = MODELS[model] if model else None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        corpus, store = corpus_file(folder), join_store(place)
        os.environ.update(ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu")
        join_default_group(place, store, stack)
        samples = other.samples if other is not None else tokens // SEQUENCE
        setting = Setting(place, store, stack, folder, corpus, samples, other)
        sides: dict[str, Callable[[], Any]] = {name: _trained(setting, name) for name in (TRAIN, TRAIN_AGAIN)}
        sides |= {name: OWN_SIDES[name](setting) for name in sorted({OWN, *(PEERS[peer][2] for peer in peers)})}
        sides |= {name: PEERS[name][1](setting) for name in peers}
        clock = join_group("clock", place, store)
        turns = interleaved(sides, clock, pairs=pairs, always=sorted(sides), warm=True)
    if place.rank != 0:
        return None
    compared = [(OWN, TRAIN), *((PEERS[peer][2], peer) for peer in peers)]
    compared += [(TRAIN, peer) for peer in peers if other is not None and PEERS[peer][2] == OWN]
    return _result(turns, compared, load=model or f"{tokens} tokens a rank", ranks=place.world_size)


def _trained(setting: Setting, name: str) -> Callable[[], Any]:
    """The body of the loop of `shoal train`."""
    folder, other, objects = setting.folder / name, setting.other, UserObjects()
    if other is None:
        folder.mkdir()
        run_file = gpt_run_file(folder, setting.corpus, setting.samples * SEQUENCE * setting.place.world_size)
    else:
        run_file = setting.run_file(folder)
        objects = UserObjects(model=other.new, data=setting.data(), loss=other.losses)
    store = PrefixStore(name, setting.store)
    training = start_training(run_file, setting.place, setting.stack, store=store, objects=objects)
    return partial(take_step, training_job(training, folder, setting.stack))


def _result(turns: Turns, compared: Sequence[tuple[str, str]], *, load: str, ranks: int) -> Result:
    times = columns(turns)
    again = again_cells(ratios(turns, TRAIN_AGAIN, peer=TRAIN))
    rows, checks = [], []
    for side, peer in compared:
        gained = ratios(turns, side, peer=peer)
        (own_ms,) = milliseconds({side: times[side]}).values()
        (peer_ms,) = milliseconds({peer: times[peer]}).values()
        rows.append(
            {
                "side": side,
                "peer": peer,
                "load": load,
                "ranks": ranks,
                "pairs": len(gained),
                "side_ms": own_ms,
                "peer_ms": peer_ms,
                "ratio_median": round(statistics.median(gained), 4),
                "ratio_lower_95": round(lower_bound(gained), 4),
                **again,
            }
        )
        what = f"{side} against {peer}, 95 % bound, {load}"
        checks.append(check(what, lower_bound(gained), WITHIN if peer == TRAIN else 1.0))
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(own_loop)
