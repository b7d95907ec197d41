"""What the ledger says of training beside what the kernel counted: replicas, ZeRO-3, tensor and pipeline.

A small GPT trains over one link, in one layout after the other. Of each rank's steps, the ledger's bytes to other hosts
stand beside those of the interface: all of them, and without the headers, of which each packet has 66 bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore

from shoal.checkpoint.agreement import LocalExchange
from shoal.comm.volume import HEADER_BYTES
from shoal.engine.loop import take_step
from shoal.launch.environment import Place
from shoal.launch.lab.lab_file import Lab
from shoal.models.config import GPTConfig
from shoal.parallel.config import PipelineConfig
from shoal.recipes.benchmarks.gpt_job import corpus_file, gpt_job, gpt_run_file
from shoal.recipes.benchmarks.link_group import gathered, meet, while_counting
from shoal.recipes.benchmarks.machine import Result
from shoal.recipes.benchmarks.paired import check
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import set_up
from shoal.runfile.run_file import RunFile
from shoal.topology.config import LayoutConfig

STEPS, WARM_UP, TOKENS = 3, 2, 1024
TOLERANCE = 0.03
MODEL = GPTConfig(layers=2, width=128, heads=4)
LAYOUTS = {
    "replicate": LayoutConfig(replicate=2),
    "zero-3": LayoutConfig(shard=2),
    "tensor": LayoutConfig(tensor=2),
    "pipeline": LayoutConfig(pipeline=2),
}


def measure(lab: Lab, place: Place, *, name: str, environ: Mapping[str, str]) -> Result | None:
    """A row for each layout and rank."""
    meeting = meet(place, environ)
    clock = meeting.group("clock", transport="gloo")
    rows: list[dict[str, Any]] = []
    for kind in LAYOUTS:
        said, seen, packets = _counts(kind, place, PrefixStore(kind, meeting.store), clock)
        everyone = gathered(clock, [said, seen, packets])
        rows += [_row(kind, rank, lab, *figures) for rank, figures in enumerate(everyone)]
    if place.rank != 0:
        return None
    checks = [
        check(f"{kind}: interface against ledger, worst rank", _worst(rows, kind), TOLERANCE, at_most=True)
        for kind in LAYOUTS
    ]
    return {"rows": rows, "checks": checks}


def _counts(kind: str, place: Place, store: Any, clock: Any) -> tuple[float, float, float]:
    """(bytes of the ledger to other hosts, bytes and packets of the interface) of this rank's steps."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        setting = set_up(_run_file(kind, folder), place, UserObjects(), store=store)
        job = gpt_job(setting, folder, stack, exchange=LocalExchange(), ranks=1)
        for _ in range(WARM_UP):
            take_step(job)
        said: list[int] = []

        def steps() -> None:
            for _ in range(STEPS):
                said.append(sum(entry.between_bytes for entry in take_step(job).wire.values()))

        seen = while_counting(clock, steps)
    return sum(said), seen.bytes_sent, seen.packets_sent


def _run_file(kind: str, folder: Path) -> RunFile:
    run_file = gpt_run_file(folder, corpus_file(folder), TOKENS)
    return msgspec.structs.replace(
        run_file, model=MODEL, layout=LAYOUTS[kind], pipeline=PipelineConfig(schedule="1F1B", microbatches=4)
    )


def _row(kind: str, rank: int, lab: Lab, said: float, seen: float, packets: float) -> dict[str, Any]:
    return {
        "part": "ledger",
        "layout": kind,
        "rank": rank,
        "mbit": lab.hosts[0].rate_mbit,
        "steps": STEPS,
        "ledger_bytes": int(said),
        "interface_bytes": int(seen),
        "interface_packets": int(packets),
        "interface_to_ledger": round(seen / said, 4),
        "without_headers_to_ledger": round((seen - HEADER_BYTES * packets) / said, 4),
    }


def _worst(rows: list[dict[str, Any]], kind: str) -> float:
    return max(abs(row["interface_to_ledger"] - 1) for row in rows if row["layout"] == kind)
