"""Training over one slow link: the ledger beside the kernel's counters, and gradients that leave by priority.

The ledger: a small GPT trains in one layout after the other. The bytes to other hosts in the ledger of each rank's
steps are compared with those that the interface counted, headers included (66 bytes of each packet) and not.

Priority: in the backward, both schedules hide the sums of gradients. Afterwards, the ordered one waits for the rest,
while the prioritised one goes on with the forward, which waits for each layer alone. With F and B the seconds of
forward and backward, and W those of the wire, a step takes at best

    in order       F + max(B, W)
    by priority    max(F + B, W)

Large buckets are those of one host; buckets as small as partitions are between order and priority. Over real links the
processors that compute also carry the traffic; in a throttled lab they carry little, and the wire is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.bench.groups import gathered, join_group, join_store, while_counting
from shoal.bench.pairs import ratios
from shoal.bench.ranks import rank_folder
from shoal.bench.report import Result, check
from shoal.bench.training_job import corpus_file, gpt_run_file, start_training, training_job
from shoal.bench.turns import interleaved
from shoal.comm.collective import Collective
from shoal.comm.ledger import Entry
from shoal.comm.volume import HEADER_BYTES
from shoal.engine.loop import Job, take_step
from shoal.gradients.config import FAR_BUCKET_BYTES, NEAR_BUCKET_BYTES, GradientsConfig
from shoal.gradients.gradients import Gradients
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import Lab
from shoal.models.config import GPTConfig
from shoal.optim.config import AdamW
from shoal.parallel.config import PipelineConfig
from shoal.topology.config import LayoutConfig

LEDGER_STEPS, LEDGER_WARM_UP, LEDGER_TOKENS = 3, 2, 1024
TOLERANCE = 0.03
MODEL = GPTConfig(layers=2, width=128, heads=4)
LAYOUTS = {
    "replicate": LayoutConfig(replicate=2),
    "zero-3": LayoutConfig(shard=2),
    "tensor": LayoutConfig(tensor=2),
    "pipeline": LayoutConfig(pipeline=2),
}
PRIORITY_STEPS, PRIORITY_TURNS, PRIORITY_TOKENS = 8, 10, 512
PARTITION_BYTES = 1 << 20
SCHEDULES = {
    "order": GradientsConfig(bucket_bytes=FAR_BUCKET_BYTES),
    "order, large buckets": GradientsConfig(bucket_bytes=NEAR_BUCKET_BYTES),
    "order, small buckets": GradientsConfig(bucket_bytes=PARTITION_BYTES),
    "priority": GradientsConfig(schedule="priority", partition_bytes=PARTITION_BYTES),
}


def measure_ledger(lab: Lab, place: Place, *, name: str) -> Result | None:
    """A row for each layout and rank."""
    store = join_store(place)
    clock = join_group("clock", place, store, transport="gloo")
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        counts = gathered(clock, _count(layout, place, PrefixStore(layout, store), clock))
        rows += [_ledger_row(layout, rank, lab, *own) for rank, own in enumerate(counts)]
    if place.rank != 0:
        return None
    worst = {
        layout: max(abs(row["interface_to_ledger"] - 1) for row in rows if row["layout"] == layout)
        for layout in LAYOUTS
    }
    checks = [
        check(f"{layout}: interface against ledger, worst rank", off, TOLERANCE, at_most=True)
        for layout, off in worst.items()
    ]
    return {"rows": rows, "checks": checks}


def measure_priority(lab: Lab, place: Place, *, name: str) -> Result | None:
    """A row for each schedule, and no checks.

    A turn is several steps in a row, so that the sums of one can hide behind the forward of the next. It ends when all
    parameters are updated.
    """
    store = join_store(place)
    clock = join_group("clock", place, store, transport="gloo")
    exposed: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    with ExitStack() as stack:
        folder = stack.enter_context(rank_folder())
        run_file = gpt_run_file(folder, corpus_file(folder), PRIORITY_TOKENS)
        run_file = msgspec.structs.replace(run_file, optimizer=AdamW(clip_norm=float("inf")))
        sides: dict[str, Callable[[], Any]] = {}
        for schedule, gradients in SCHEDULES.items():
            own = msgspec.structs.replace(run_file, gradients=gradients)
            training = start_training(own, place, stack, store=PrefixStore(schedule, store))
            job = training_job(training, folder, stack)
            sides[schedule] = partial(_steps, job, training.run.generation.gradients, exposed[schedule])
        turns = interleaved(sides, clock, pairs=PRIORITY_TURNS, always=tuple(sides))
    counted_steps = PRIORITY_STEPS * PRIORITY_TURNS
    waited = gathered(clock, [statistics.median(seconds[-counted_steps:]) for seconds in exposed.values()])
    if place.rank != 0:
        return None
    rows = [
        {
            "part": "priority",
            "lab": name,
            "schedule": schedule,
            "mbit": lab.rate_mbit(0, 1),
            "step_ms": round(1e3 * statistics.median(turn[schedule] for turn in turns) / PRIORITY_STEPS, 2),
            "exposed_ms": round(1e3 * max(rank[number] for rank in waited), 2),
            "times_as_fast_as_order": round(statistics.median(ratios(turns, schedule, peer="order")), 4),
            "turns": len(turns),
        }
        for number, schedule in enumerate(SCHEDULES)
    ]
    return {"rows": rows, "checks": []}


def _count(layout: str, place: Place, store: Store, clock: Collective) -> list[float]:
    """Bytes of the ledger to other hosts, bytes and packets of the interface, in some steps of this rank."""
    with ExitStack() as stack:
        folder = stack.enter_context(rank_folder())
        run_file = msgspec.structs.replace(
            gpt_run_file(folder, corpus_file(folder), LEDGER_TOKENS),
            model=MODEL,
            layout=LAYOUTS[layout],
            pipeline=PipelineConfig(schedule="1F1B", microbatches=4),
        )
        job = training_job(start_training(run_file, place, stack, store=store), folder, stack)
        for _ in range(LEDGER_WARM_UP):
            take_step(job)
        ledger_bytes: list[int] = []

        def steps() -> None:
            for _ in range(LEDGER_STEPS):
                ledger_bytes.append(sum(entry.between_bytes for entry in take_step(job).wire.values()))

        interface = while_counting(clock, steps)
    return [sum(ledger_bytes), interface.bytes_sent, interface.packets_sent]


def _ledger_row(
    layout: str, rank: int, lab: Lab, ledger_bytes: float, interface_bytes: float, packets: float
) -> dict[str, Any]:
    return {
        "part": "ledger",
        "layout": layout,
        "rank": rank,
        "mbit": lab.hosts[0].rate_mbit,
        "steps": LEDGER_STEPS,
        "ledger_bytes": int(ledger_bytes),
        "interface_bytes": int(interface_bytes),
        "interface_packets": int(packets),
        "interface_to_ledger": round(interface_bytes / ledger_bytes, 4),
        "without_headers_to_ledger": round((interface_bytes - HEADER_BYTES * packets) / ledger_bytes, 4),
    }


def _steps(job: Job, gradients: Gradients, exposed: list[float]) -> None:
    """A turn; appends the seconds that each step waited for the wire."""
    for _ in range(PRIORITY_STEPS):
        exposed.append(sum(take_step(job).wire.values(), Entry()).exposed_s)
    gradients.settle()
