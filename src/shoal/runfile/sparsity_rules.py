"""The rules between `[sparsity]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.optim.config import AdamW8bit
from shoal.runfile.run_file import RunFile


def sparsity_refusal(run_file: RunFile) -> str | None:
    """One sentence if masks cannot be put on what another table asks for."""
    config = run_file.sparsity
    if config is None:
        return None
    schedule, steps = config.schedule, run_file.run.steps
    if not config.starts_sparse and max(schedule.begin, schedule.end or 0) > steps:
        last = "end" if schedule.begin <= steps else "begin"
        return (
            f"sparsity.schedule.{last} = {schedule.end if last == 'end' else schedule.begin} with run.steps = {steps}: "
            "the run would end before it has its density; lower it, or raise run.steps"
        )
    found = next(_against_masks(run_file), None)
    return found and f'sparsity.kind = "{config.variant}" with {found[0]}: {found[1]}; leave one of the two out'


def _against_masks(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not)"""
    optimizer, sync = run_file.optimizer, run_file.sync
    if sync.replicas_are != "lockstep":
        yield f'sync.kind = "{sync.variant}"', "its replicas have no agreed gradient by which to decide one mask"
    if run_file.elastic is not None:
        yield "[elastic]", "masks are not carried from one membership to the next"
    if run_file.codec.variant != "none":
        yield (
            f'codec.kind = "{run_file.codec.variant}"',
            "replicas send gradients of unmasked weights alone already",
        )
    if optimizer.sends_momentum:
        yield f'optimizer.kind = "{optimizer.variant}"', "its ranks sum momenta, which have no masks"
    if isinstance(optimizer, AdamW8bit):
        yield f'optimizer.kind = "{optimizer.variant}"', "moments of masked weights share their scale with others"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "weights are updated before the whole gradient is there"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f'pipeline.schedule = "{run_file.pipeline.schedule}"', "stages are never at the same gradient"
