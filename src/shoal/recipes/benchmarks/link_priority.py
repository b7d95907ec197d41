"""Steps of a GPT on two hosts: gradients in order, with a barrier at the end, beside those by priority without one.

Of the backward both hide sums. Behind it, one waits for what is left; the other goes on with the forward, which waits
for each layer alone. With F and B the seconds of forward and backward, and W those of the wire, a step takes at best

    in order       F + max(B, W)
    by priority    max(F + B, W)

Large buckets are those of one host; those as small as partitions stand between order and priority. In a lab of real
links the processors that compute also carry the traffic; in the throttled one they carry little, and the wire is what
counts.

A turn is several steps in a row, so that the sums of one can lie behind the forward of the next, and ends when all is
updated.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.checkpoint.agreement import LocalExchange
from shoal.comm.ledger import Entry
from shoal.engine.loop import Job, take_step
from shoal.gradients.config import FAR_BUCKET_BYTES, NEAR_BUCKET_BYTES, GradientsConfig
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import Lab
from shoal.optim.config import AdamW
from shoal.recipes.benchmarks.gpt_job import corpus_file, gpt_job, gpt_run_file
from shoal.recipes.benchmarks.link_group import gathered, meet
from shoal.recipes.benchmarks.machine import Result
from shoal.recipes.benchmarks.turns import interleaved, ratios
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import set_up
from shoal.runfile.run_file import RunFile, run_directory

STEPS, PAIRS, TOKENS = 8, 10, 512
PARTITION_BYTES = 1 << 20
SYNCS = {
    "order": GradientsConfig(bucket_bytes=FAR_BUCKET_BYTES),
    "order, large buckets": GradientsConfig(bucket_bytes=NEAR_BUCKET_BYTES),
    "order, small buckets": GradientsConfig(bucket_bytes=PARTITION_BYTES),
    "priority": GradientsConfig(schedule="priority", partition_bytes=PARTITION_BYTES),
}


def measure(lab: Lab, place: Place, *, name: str, environ: Mapping[str, str]) -> Result | None:
    """A row for each schedule; nothing is promised."""
    meeting = meet(place, environ)
    clock = meeting.group("clock", transport="gloo")
    exposed: dict[str, list[float]] = {kind: [] for kind in SYNCS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        run_file = gpt_run_file(folder, corpus_file(folder), TOKENS)
        jobs = {
            kind: _job(run_file, gradients, place, PrefixStore(kind, meeting.store), stack)
            for kind, gradients in SYNCS.items()
        }
        sides: dict[str, Callable[[], Any]] = {
            kind: lambda kind=kind, job=job: _steps(job, exposed[kind]) for kind, job in jobs.items()
        }
        turns = interleaved(sides, clock, pairs=PAIRS, always=tuple(sides))
    waited = gathered(clock, [statistics.median(seconds[-STEPS * PAIRS :]) for seconds in exposed.values()])
    if place.rank != 0:
        return None
    rows = [
        {
            "part": "priority",
            "lab": name,
            "schedule": kind,
            "mbit": lab.rate_mbit(0, 1),
            "step_ms": round(1e3 * statistics.median(turn[kind] for turn in turns) / STEPS, 2),
            "exposed_ms": round(1e3 * max(rank[number] for rank in waited), 2),
            "times_as_fast_as_order": round(statistics.median(ratios(turns, kind, peer="order")), 4),
            "turns": len(turns),
        }
        for number, kind in enumerate(SYNCS)
    ]
    return {"rows": rows, "checks": []}


def _steps(job: Job, exposed: list[float]) -> None:
    """A turn; adds the seconds that each step stood still for the wire."""
    for _ in range(STEPS):
        exposed.append(sum(take_step(job).wire.values(), Entry()).exposed_s)
    job.step.sync.settle()


def _job(run_file: RunFile, gradients: GradientsConfig, place: Place, store: Store, stack: ExitStack) -> Job:
    run_file = msgspec.structs.replace(run_file, gradients=gradients, optimizer=AdamW(clip_norm=float("inf")))
    setting = set_up(run_file, place, UserObjects(), store=store)
    return gpt_job(setting, run_directory(run_file), stack, exchange=LocalExchange(), ranks=1)
