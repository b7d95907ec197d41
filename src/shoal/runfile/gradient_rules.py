"""The rules between `[gradients]`, `[wire]` and the other tables. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.engine.config import Float16
from shoal.runfile.run_file import RunFile


def gradients_refusal(run_file: RunFile) -> str | None:
    """One sentence if `[gradients]` asks for what this run cannot do.

    With `schedule = "priority"` parameters are updated one after the other while other gradients are on the wire, so
    whatever needs the whole gradient before any update is refused, and whatever has more than one group of ranks.
    """
    if run_file.gradients.bucket == "auto" and (found := next(_against_search(run_file), None)):
        return f'gradients.bucket = "auto" with {found[0]}: {found[1]}; leave gradients.bucket out'
    if run_file.gradients.schedule == "priority" and (found := next(_against_priority(run_file), None)):
        return f'gradients.schedule = "priority" with {found[0]}: {found[1]}'
    return None


def _against_search(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not)"""
    if run_file.layout.shard > 1:
        yield f"layout.shard = {run_file.layout.shard}", "there optimizer state lies as its buckets do, and stays"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "its stages have no step in common to be timed"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "it has partitions (gradients.partition_bytes) and no buckets"


def _against_priority(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, clip_norm = run_file.layout, run_file.optimizer.clip_norm
    for axis in ("pipeline", "shard", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "it is for replicas of one rank; use layout.replicate"
    if clip_norm is not None and math.isfinite(clip_norm):
        why = "the norm of the whole gradient is known only when updates are made; set optimizer.clip_norm = inf"
        yield f"optimizer.clip_norm = {clip_norm:g}", why
    if run_file.optimizer.works_on == "matrices":
        why = 'it updates whole matrices in buckets, and here parameters come one by one; use "order"'
        yield f'optimizer.kind = "{run_file.optimizer.variant}"', why
    if run_file.optimizer.average is not None or run_file.optimizer.lookahead is not None:
        yield "optimizer.average or optimizer.lookahead", "they follow whole updates; leave them out"
    if isinstance(run_file.precision, Float16):
        yield 'precision.kind = "float16"', "an overflow shows only when updates are made; use bfloat16"
    if run_file.observe.noise_every_steps:
        yield (
            f"observe.noise_every_steps = {run_file.observe.noise_every_steps}",
            ("the noise needs the norm of the step that it was measured in; measure it under the schedule by order"),
        )
    if run_file.wire.check_collectives:
        why = "it looks at one wait of a rank at a time, and here a second thread waits; leave it out"
        yield "wire.check_collectives = true", why
    if run_file.run.compile:
        yield run_file.run.compile_said, "a compiled model does not say which module it comes to; leave run.compile out"
    if run_file.run.device == "cuda":
        yield 'run.device = "cuda"', "a credit of bytes on the wire is kept between processors only so far"


def wire_refusal(run_file: RunFile) -> str | None:
    """One sentence if the algorithm cannot run on the transport, or ranks of one GPU cannot talk over it."""
    algorithm, transport, layout = run_file.wire.algorithm, run_file.wire.transport, run_file.layout
    if run_file.run.share_gpus and transport != "gloo":
        return (
            f'run.share_gpus = true with wire.transport = "{transport}": NCCL refuses two ranks on one GPU; set '
            'wire.transport = "gloo"'
        )
    if run_file.run.share_gpus and layout.pipeline * layout.context > 1:
        key = "pipeline" if layout.pipeline > 1 else "context"
        return (
            f"run.share_gpus = true with layout.{key} = {getattr(layout, key)}: its ranks send tensors to each other, "
            "and Gloo sends those of the CPU alone; set it to 1, or give each rank a GPU"
        )
    if algorithm != "backend" and transport not in ("auto", "gloo"):
        return (
            f'wire.algorithm = "{algorithm}" with wire.transport = "{transport}": algorithms are for groups over Gloo; '
            'set wire.transport = "gloo", or leave one of them out'
        )
    return None
