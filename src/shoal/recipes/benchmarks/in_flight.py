"""Activations that a pipeline rank keeps in a training step: as many microbatches' as its schedule has in flight.

    most kept = in flight x what one microbatch keeps,

the latter measured with a step of one microbatch. The stages' activations differ from rank to rank; the count does
for each rank by itself.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.config import WireConfig
from shoal.data.config import BatchConfig, Tokens
from shoal.data.cursor import Cursor
from shoal.launch.environment import Place
from shoal.memory.tracker import SavedActivations
from shoal.models.config import GPTConfig
from shoal.parallel.config import PipelineConfig
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.benchmarks.gpt_job import corpus_file
from shoal.recipes.benchmarks.paired import check
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import Setting, set_up
from shoal.runfile.run_file import RunConfig, RunFile
from shoal.schedules.build import build
from shoal.schedules.names import Schedule
from shoal.schedules.timeline import in_flight
from shoal.topology.config import LayoutConfig

MODEL = GPTConfig(layers=8, width=64, heads=4)
MICROBATCHES, SEQUENCE, LR = 8, 128, 1e-3
SCHEDULES: tuple[Schedule, ...] = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
OFF_THE_COUNT = 0.10


def by_schedule(place: Place, store: Store) -> dict[str, Any]:
    """A row for each schedule of one stage a rank, and checks; the same on every rank."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        corpus = corpus_file(Path(folder))
        one = _most_kept(place, PrefixStore("one", store), corpus, "1F1B", 1)
        kept = {name: _most_kept(place, PrefixStore(name, store), corpus, name, MICROBATCHES) for name in SCHEDULES}
    rows, checks = [], []
    for name in SCHEDULES:
        counts = in_flight(build(name, ranks=place.world_size, microbatches=MICROBATCHES))
        in_microbatches = [most / unit for most, unit in zip(kept[name], one, strict=True)]
        off = max(abs(found / count - 1) for found, count in zip(in_microbatches, counts, strict=True))
        rows.append(
            {
                "schedule": name,
                "microbatches": MICROBATCHES,
                "most_kept_bytes": kept[name],
                "in_microbatches": [round(value, 3) for value in in_microbatches],
                "in_flight": list(counts),
            }
        )
        checks.append(check(f"{name}: activations of a rank off its count in flight", off, OFF_THE_COUNT, at_most=True))
    return {"rows": rows, "checks": checks}


def _most_kept(place: Place, store: Store, corpus: Path, schedule: Schedule, microbatches: int) -> list[int]:
    """Bytes, by rank."""
    run_file = RunFile(
        run=RunConfig(name="bench", steps=1, directory=str(corpus.parent)),
        model=MODEL,
        data=Tokens(path=str(corpus), dtype="uint8"),
        wire=WireConfig(timeout_s=600.0),
        batch=BatchConfig(global_samples=microbatches, sequence=SEQUENCE),
        layout=LayoutConfig(pipeline=place.world_size),
        pipeline=PipelineConfig(schedule=schedule, microbatches=microbatches),
    )
    setting = set_up(run_file, place, UserObjects(), store=store)
    by_rank = torch.zeros(place.world_size, dtype=torch.int64)
    by_rank[place.rank] = _step_keeps(setting)
    setting.mesh.world.all_reduce(by_rank).wait()
    return by_rank.tolist()


def _step_keeps(setting: Setting) -> int:
    """The most bytes that one step saves for the backward at once."""
    sync = new_sync(setting)
    step = new_step(setting, new_state(setting, sync), sync)
    with closing(new_feed(setting, Cursor())) as feed, SavedActivations(apart=setting.model.parameters()) as saved:
        step(1, feed.next().microbatches, lr=LR)
    return saved.peak_bytes
