"""What does not go together with a choice of `[sync]`.

Under `sync.schedule = "priority"` parameters are updated one after the other, while other gradients are on the wire:
refused is what needs the whole gradient before any update, and what has more than one group of ranks. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.engine.config import Float16
from shoal.recipes.run_file import RunFile


def sync_refusal(run_file: RunFile) -> str | None:
    """The first thing that cannot be, as a sentence; None where all can."""
    algorithm, transport = run_file.sync.algorithm, run_file.sync.transport
    if algorithm != "backend" and transport not in ("auto", "gloo"):
        return (
            f'sync.algorithm = "{algorithm}" with sync.transport = "{transport}": algorithms are for groups over Gloo; '
            'set sync.transport = "gloo", or leave one of them out'
        )
    if run_file.sync.bucket == "auto" and (found := next(_against_search(run_file), None)):
        return f'sync.bucket = "auto" with {found[0]}: {found[1]}; leave sync.bucket out'
    if run_file.sync.schedule == "priority" and (found := next(_against_priority(run_file), None)):
        return f'sync.schedule = "priority" with {found[0]}: {found[1]}'
    return None


def _against_search(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """The key, and why it cannot be."""
    if run_file.layout.shard > 1:
        yield f"layout.shard = {run_file.layout.shard}", "there optimizer state lies as its buckets do, and stays"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "its stages have no step in common to be timed"
    if run_file.sync.schedule == "priority":
        yield 'sync.schedule = "priority"', "it has partitions (sync.partition_bytes) and no buckets"


def _against_priority(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """The key, and why it cannot be and what to do."""
    layout, clip_norm = run_file.layout, run_file.optimizer.clip_norm
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "it is for replicas of one rank; use layout.replicate"
    if clip_norm is not None and math.isfinite(clip_norm):
        why = "the norm of the whole gradient is known only when updates are made; set optimizer.clip_norm = inf"
        yield f"optimizer.clip_norm = {clip_norm:g}", why
    if isinstance(run_file.precision, Float16):
        yield 'precision.kind = "float16"', "an overflow shows only when updates are made; use bfloat16"
    if run_file.observe.noise_every_steps:
        yield (
            f"observe.noise_every_steps = {run_file.observe.noise_every_steps}",
            ("the noise needs the norm of the step that it was measured in; measure it under the schedule by order"),
        )
    if run_file.observe.check_collectives:
        why = "it looks at one wait of a rank at a time, and here a second thread waits; leave it out"
        yield "observe.check_collectives = true", why
    if run_file.run.compile:
        yield "run.compile = true", "a compiled model does not say which module it comes to; leave run.compile out"
    if run_file.run.device == "cuda":
        yield 'run.device = "cuda"', "a credit of bytes on the wire is kept between processors only so far"
