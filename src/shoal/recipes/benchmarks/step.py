"""`shoal bench step`: a training step of Shoal beside the same step in a hand-written DDP script.

Two ranks of one thread hold both, and a third DDP and a plain model beside them. Steps are taken in turn, in an order
that changes from pair to pair, each after a barrier, so that what slows the machine slows all sides. DDP against its
twin (A/A) shows how large a ratio noise alone makes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.checkpoint.exchange import LocalExchange
from shoal.comm.collective import GroupCollective
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.engine.loop import take_step
from shoal.launch.environment import Place
from shoal.models.build import build as build_model
from shoal.models.initialise import initialise
from shoal.observe.events import read_events
from shoal.recipes.benchmarks.ddp_script import Script
from shoal.recipes.benchmarks.gpt_job import MODEL, SEQUENCE, corpus_file, gpt_job, gpt_run_file
from shoal.recipes.benchmarks.paired import check, lower_bound, milliseconds, spread
from shoal.recipes.benchmarks.turns import WARM_UP_STEPS, interleaved, ratios
from shoal.recipes.objects import Given
from shoal.recipes.setting import set_up

BOUNDS = {256: 1.0, 2048: 0.98}
LOOP_COST, SCALING = 0.02, 1.7


def measure(place: Place, *, tokens: int, pairs: int, alone: int) -> dict[str, Any] | None:
    """One row and its checks, for `tokens` a rank and step; None on all ranks but the first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        corpus = corpus_file(folder)
        setting = set_up(gpt_run_file(folder, corpus, tokens * place.world_size), place, Given())
        dist.init_process_group(
            "gloo", store=PrefixStore("ddp", setting.store), rank=place.rank, world_size=place.world_size
        )
        stack.callback(dist.destroy_process_group)
        job = gpt_job(setting, folder, stack, exchange=LocalExchange(), ranks=1)
        sides: dict[str, Callable[[], Any]] = {
            name: _script(corpus, tokens, place, distributed=distributed).step
            for name, distributed in (("ddp", True), ("ddp_twin", True), ("no_communication", False))
        }
        sides["shoal"] = lambda: take_step(job)
        clock = connect(
            PrefixStore("clock", setting.store),
            place.rank,
            place.world_size,
            device=setting.device,
            label="clock",
            ledger=Ledger(),
            timeout_s=600.0,
        )
        turns = interleaved(sides, clock, pairs=pairs, always=("ddp", "shoal"))
        alone_s = _alone(sides["no_communication"], clock, steps=alone)
        return _row(turns, alone_s, folder, tokens=tokens, world=place.world_size) if place.rank == 0 else None


def _alone(step: Callable[[], Any], clock: GroupCollective, *, steps: int) -> list[float]:
    """Seconds of steps of rank 0 while the others wait: what one process of one thread does by itself."""
    times = []
    clock.barrier().wait()
    if clock.rank == 0:
        for _ in range(steps):
            begin_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin_s)
    clock.barrier().wait()
    return times


def _row(
    turns: list[dict[str, float]], alone_s: list[float], folder: Path, *, tokens: int, world: int
) -> dict[str, Any]:
    gained, twins = ratios(turns, "shoal", peer="ddp"), ratios(turns, "ddp_twin", peer="ddp")
    times = {name: [turn[name] for turn in turns if name in turn] for name in turns[0]}
    cost = _loop_cost(folder)
    scaling = world * statistics.median(alone_s) / statistics.median(times["shoal"])
    row = {
        "tokens_per_rank": tokens,
        "ranks": world,
        "pairs": len(gained),
        **milliseconds({**times, "one_process_alone": alone_s}),
        "ratio_median": round(statistics.median(gained), 4),
        "ratio_lower_95": round(lower_bound(gained), 4),
        "aa_median": round(statistics.median(twins), 4),
        "aa_spread": [round(value, 4) for value in spread(twins)],
        "loop_cost": round(cost, 5),
        "scaling": round(scaling, 3),
    }
    bound = BOUNDS.get(tokens, min(BOUNDS.values()))
    checks = [
        check(f"tokens/s against DDP, 95 % bound, {tokens} tokens a rank", lower_bound(gained), bound),
        check(f"loop above the sum of its parts, {tokens} tokens a rank", cost, LOOP_COST, at_most=True),
    ]
    if tokens >= max(BOUNDS):
        checks.append(check(f"{world} processes against one, {tokens} tokens a rank", scaling, SCALING))
    return {"row": row, "checks": checks}


def _loop_cost(folder: Path) -> float:
    """By how much the loop's steps exceed the sum of their parts, in the median."""
    parts = ("time/data", "time/forward_backward", "time/sync_exposed", "time/optimizer", "time/checkpoint_stall")
    costs = []
    for event in read_events(folder)[WARM_UP_STEPS:]:
        values = {name: event.get(name) or 0.0 for name in (*parts, "time/step")}
        costs.append(values["time/step"] / sum(values[name] for name in parts) - 1)
    return statistics.median(costs)


def _script(corpus: Path, tokens: int, place: Place, *, distributed: bool) -> Script:
    model = build_model(MODEL)
    initialise(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    samples = tokens // SEQUENCE
    return Script(model, corpus, samples=samples, sequence=SEQUENCE, rank=place.rank, distributed=distributed)
