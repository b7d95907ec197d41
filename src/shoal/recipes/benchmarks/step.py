"""`shoal bench step`: a training step of Shoal beside the same step in a hand-written DDP script.

Ranks of one thread hold both, and a second DDP and a plain model beside them. Steps are taken in turn, in an order
that changes from pair to pair, each after a barrier, so that what slows the machine slows all sides. DDP against its
twin (A/A) shows how large a ratio noise alone makes.

Shoal's side stands there twice: `shoal` sums gradients and updates all parameters on every rank, as DDP does;
`shoal_zero_1` is the same run file with `layout.shard` at the number of ranks and `memory.zero = 1`: each rank updates
its part of the parameters and keeps that part of the optimizer's state alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.checkpoint.agreement import LocalExchange
from shoal.comm.collective import GroupCollective
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.engine.loop import Job, take_step
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.models.build import build as build_model
from shoal.models.initialise import initialise
from shoal.observe.events import read_events
from shoal.recipes.benchmarks.ddp_script import Script
from shoal.recipes.benchmarks.gpt_job import MODEL, SEQUENCE, corpus_file, gpt_job, gpt_run_file
from shoal.recipes.benchmarks.paired import check, lower_bound, milliseconds, spread
from shoal.recipes.benchmarks.turns import WARM_UP_STEPS, interleaved, ratios
from shoal.recipes.objects import Given
from shoal.recipes.setting import set_up

START_TIMEOUT_S = 600.0
BOUNDS = {(256, 2): 1.05, (256, 4): 1.15, (2048, 2): 1.0, (2048, 4): 1.0}
"""Promised of the 95 % bound of the ratio to DDP, by tokens of a rank and ranks."""
OTHER_BOUND = 1.0
SHOAL = ("shoal", "shoal_zero_1")
SCALING_TOKENS = 2048
LOOP_COST, SCALING = 0.02, 1.7


def measure(place: Place, *, tokens: int, pairs: int, alone: int) -> dict[str, Any] | None:
    """One row and its checks, for `tokens` a rank and step; None on all ranks but the first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        corpus = corpus_file(folder)
        store = open_store(place, os.environ, timeout_s=START_TIMEOUT_S)
        dist.init_process_group("gloo", store=PrefixStore("ddp", store), rank=place.rank, world_size=place.world_size)
        stack.callback(dist.destroy_process_group)
        jobs = {name: _job(name, folder, corpus, tokens, place, store, stack) for name in SHOAL}
        sides: dict[str, Callable[[], Any]] = {
            name: _script(corpus, tokens, place, distributed=distributed).step
            for name, distributed in (("ddp", True), ("ddp_twin", True), ("no_communication", False))
        }
        sides |= {name: lambda job=job: take_step(job) for name, job in jobs.items()}
        clock = connect(
            PrefixStore("clock", store),
            place.rank,
            place.world_size,
            device=torch.device("cpu"),
            label="clock",
            ledger=Ledger(),
            wire=WireConfig(timeout_s=600.0),
        )
        turns = interleaved(sides, clock, pairs=pairs, always=("ddp", *SHOAL))
        alone_s = _alone(sides["no_communication"], clock, steps=alone)
        return (
            _row(turns, alone_s, folder / SHOAL[0], tokens=tokens, world=place.world_size) if place.rank == 0 else None
        )


def _job(
    name: str, folder: Path, corpus: Path, tokens: int, place: Place, store: Store, stack: ExitStack
) -> Job:  # fmt: skip
    run_file = gpt_run_file(folder / name, corpus, tokens * place.world_size)
    if name == "shoal_zero_1":
        layout = msgspec.structs.replace(run_file.layout, shard=place.world_size)
        memory = msgspec.structs.replace(run_file.memory, zero=1)
        run_file = msgspec.structs.replace(run_file, layout=layout, memory=memory)
    (folder / name).mkdir()
    setting = set_up(run_file, place, Given(), store=PrefixStore(name, store))
    return gpt_job(setting, folder / name, stack, exchange=LocalExchange(), ranks=1)


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
    gained = {name: ratios(turns, name, peer="ddp") for name in SHOAL}
    twins = ratios(turns, "ddp_twin", peer="ddp")
    times = {name: [turn[name] for turn in turns if name in turn] for name in turns[0]}
    cost = _loop_cost(folder)
    scaling = world * statistics.median(alone_s) / statistics.median(times["shoal"])
    row = {
        "tokens_per_rank": tokens,
        "ranks": world,
        "pairs": len(turns),
        **milliseconds({**times, "one_process_alone": alone_s}),
        "ratio_median": round(statistics.median(gained["shoal"]), 4),
        "ratio_lower_95": round(lower_bound(gained["shoal"]), 4),
        "zero_1_ratio_median": round(statistics.median(gained["shoal_zero_1"]), 4),
        "zero_1_ratio_lower_95": round(lower_bound(gained["shoal_zero_1"]), 4),
        "aa_median": round(statistics.median(twins), 4),
        "aa_spread": [round(value, 4) for value in spread(twins)],
        "loop_cost": round(cost, 5),
        "scaling": round(scaling, 3),
    }
    what = f"tokens/s against DDP, 95 % bound, {tokens} tokens a rank, {world} ranks"
    bound = BOUNDS.get((tokens, world), OTHER_BOUND)
    checks = [
        *(check(f"{name}: {what}", lower_bound(found), bound) for name, found in gained.items()),
        check(f"loop above the sum of its parts, {tokens} tokens a rank", cost, LOOP_COST, at_most=True),
    ]
    if tokens >= SCALING_TOKENS:
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
