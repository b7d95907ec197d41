"""`python -m benchmarks.compression_loss`: the time to a held-out loss over a slow link, with a codec and under DDP.

The GPT of 25 million parameters of `benchmarks.compression` trains on Python's standard library, two hosts of one rank,
256 tokens a rank and step:

    none    Shoal without a codec, over a fast link: its losses are those that DDP reaches after as many steps
    CODEC   Shoal with the codec, over the slow link
    ddp     a hand-written DDP script over the slow link, a few steps

The held-out loss is taken every few steps, which no time counts. A side's time to a loss is the seconds of its own
steps until then; for DDP, the steps that `none` needs times the median of DDP's own step.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from benchmarks.compression import CODECS, MODEL, TOKENS, two_hosts
from benchmarks.compression_auto import set_rate
from shoal.bench.ddp_script import Script, new_gpt
from shoal.bench.groups import join_default_group, join_group, join_store, slowest_rank
from shoal.bench.options import AsJson, names
from shoal.bench.ranks import is_rank, on_ranks, rank_folder, run_as_rank
from shoal.bench.report import Result, check, print_report
from shoal.bench.training_job import SEQUENCE, corpus_file, start_training
from shoal.codec.config import CodecConfig, NoCodec
from shoal.comm.collective import Collective
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place
from shoal.launcher.lab.network import why_not
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile

SLOW_MBIT, FAST_MBIT = 100, 10_000
EVALUATIONS, DDP_STEPS = 8, 4
SOONER, LOSS_BOUND = 5.0, 0.01
"""Promised: DDP's time to the loss over the codec's, and how far above the uncompressed loss the codec may end."""


def compression_loss(
    codec: Annotated[str, typer.Option(help=f"One of {', '.join(CODECS)}.")] = "power_sgd",
    steps: Annotated[int, typer.Option(help="Steps of both trainings.", min=EVALUATIONS)] = 160,
    as_json: AsJson = False,
) -> None:
    """The time to a held-out loss at 100 Mbit/s, and the loss after the same steps.

    It needs root and iproute2, as hosts are network namespaces.

    Example: python -m benchmarks.compression_loss --steps 80
    """
    names(codec, "--codec", CODECS)
    if is_rank():
        run_as_rank(lambda place: measure(place, codec=codec, steps=steps))
        return
    if reason := why_not():
        raise EnvironmentFault(f"{reason}; this benchmark has no other network")
    command = ["benchmarks.compression_loss", "--codec", codec, "--steps", str(steps)]
    print_report("compression_loss", on_ranks(command, processes=2, lab=two_hosts(SLOW_MBIT)), as_json=as_json)


def measure(place: Place, *, codec: str, steps: int) -> Result | None:
    """A row for each side; None on all ranks but rank 0."""
    with ExitStack() as stack, rank_folder() as folder:
        store = join_store(place)
        join_default_group(place, store, stack)
        clock = join_group("clock", place, store, transport="gloo")
        set_rate(FAST_MBIT, clock)
        plain = _trained("none", NoCodec(), place, store, folder, clock, steps=steps)
        set_rate(SLOW_MBIT, clock)
        coded = _trained(codec, CODECS[codec], place, store, folder, clock, steps=steps)
        script = Script(
            new_gpt(MODEL), corpus_file(folder), samples=TOKENS // SEQUENCE, sequence=SEQUENCE, rank=place.rank,
            distributed=True,
        )  # fmt: skip
        ddp_s = []
        for _ in range(1 + DDP_STEPS):
            begin_s = time.perf_counter()
            script.step()
            ddp_s.append(slowest_rank(time.perf_counter() - begin_s, clock))
    if place.rank != 0:
        return None
    return result_of(plain, coded, codec=codec, ddp_s=statistics.median(ddp_s[1:]))


Curve = dict[int, tuple[float, float]]
"""By the number of steps: seconds until then, and the held-out loss."""


def _trained(
    name: str, codec: CodecConfig, place: Place, store: Store, folder: Path, clock: Collective, *, steps: int
) -> Curve:
    found: Curve = {}
    seconds, every = 0.0, steps // EVALUATIONS
    with ExitStack() as stack:
        training = start_training(
            _run_file(folder / name, codec, place, steps=steps), place, stack, store=PrefixStore(name, store)
        )
        for number in range(1, steps + 1):
            begin_s = time.perf_counter()
            training.take_step(lr=training.run.rate(number))
            seconds += time.perf_counter() - begin_s
            if number % every == 0:
                found[number] = slowest_rank(seconds, clock), training.run.evaluate()["loss/eval"]
    return found


def _run_file(folder: Path, codec: CodecConfig, place: Place, *, steps: int) -> RunFile:
    samples = TOKENS * place.world_size // SEQUENCE
    tables: dict[str, Any] = {
        "run": {
            "name": "loss", "steps": steps, "directory": str(folder), "processes": place.world_size, "device": "cpu",
        },
        "model": {"kind": "gpt"},
        "data": {"kind": "stdlib"},
        "batch": {"global_samples": samples, "sequence": SEQUENCE},
        "optimizer": {"kind": "adamw", "lr": 1e-3, "beta2": 0.98, "weight_decay": 0.05},
        "schedule": {"kind": "cosine", "warmup_steps": steps // 10, "final_fraction": 0.02},
        "wire": {"timeout_s": 600.0},
        "checkpoint": {"every_steps": 0},
        "observe": {"evaluate_samples": 40},
    }  # fmt: skip
    return msgspec.structs.replace(run_file_of(tables, file="benchmarks.compression_loss"), model=MODEL, codec=codec)


def result_of(plain: Curve, coded: Curve, *, codec: str, ddp_s: float) -> Result:
    """The loss to reach is the higher one of the two at the end, so that both sides do."""
    last = max(plain)
    goal = max(plain[last][1], coded[last][1])
    to_plain, to_coded = (min(number for number in curve if curve[number][1] <= goal) for curve in (plain, coded))
    above = coded[last][1] / plain[last][1] - 1
    ddp_to_goal_s, coded_to_goal_s = to_plain * ddp_s, coded[to_coded][0]
    rows = [
        {"side": "none", "loss": round(plain[last][1], 4), "steps_to_loss": to_plain, "to_loss_s": None},
        {
            "side": codec, "loss": round(coded[last][1], 4), "steps_to_loss": to_coded,
            "to_loss_s": round(coded_to_goal_s, 1),
        },
        {"side": "ddp", "loss": None, "steps_to_loss": to_plain, "to_loss_s": round(ddp_to_goal_s, 1)},
    ]  # fmt: skip
    name = f"{codec}, {SLOW_MBIT} Mbit/s"
    return {
        "rows": rows,
        "checks": [
            check(f"{name}: DDP's time to {goal:.3f} over the codec's", ddp_to_goal_s / coded_to_goal_s, SOONER),
            check(f"{name}: loss after {last} steps above none", above, LOSS_BOUND, at_most=True),
        ],
    }


if __name__ == "__main__":
    run(compression_loss)
