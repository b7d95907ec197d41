"""The rules between `[optimizer]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.runfile.run_file import RunFile


def optimizer_refusal(run_file: RunFile) -> str | None:
    """One sentence if the numbers of the agreed gradient are nowhere to be changed, or elsewhere."""
    transforms = run_file.optimizer.transforms
    found = next(_against_transforms(run_file), None) if transforms else None
    if found is None:
        return None
    kinds = ", ".join(transform.variant for transform in transforms)
    return f"optimizer.transforms ({kinds}) with {found[0]}: {found[1]}; leave one of the two out"


def _against_transforms(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not)"""
    optimizer, sync = run_file.optimizer, run_file.sync
    if optimizer.sends_momentum:
        yield f'optimizer.kind = "{optimizer.variant}"', "its ranks sum momenta, not gradients"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "parameters are updated before the whole gradient is there"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "stages are never at the same gradient"
    if sync.replicas_are == "workers":
        yield f'sync.kind = "{sync.variant}"', "its workers have a gradient of their own each, and no agreed one"
