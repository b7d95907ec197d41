"""The rules between `[optimizer]` and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.optim.preconditioned_config import KFAC
from shoal.runfile.run_file import RunFile


def optimizer_refusal(run_file: RunFile) -> str | None:
    """One sentence if another table takes from the optimizer what it needs."""
    return _transforms_rule(run_file) or _average_rule(run_file) or _layers_rule(run_file)


def _transforms_rule(run_file: RunFile) -> str | None:
    transforms = run_file.optimizer.transforms
    found = next(_against_transforms(run_file), None) if transforms else None
    if found is None:
        return None
    kinds = ", ".join(transform.variant for transform in transforms)
    return f"optimizer.transforms ({kinds}) with {found[0]}: {found[1]}; leave one of the two out"


def _average_rule(run_file: RunFile) -> str | None:
    """The average is in the place of a decay; and it is that of the model, which replicas or servers may not have."""
    optimizer, schedule, sync = run_file.optimizer, run_file.schedule, run_file.sync
    if optimizer.keeps_average and schedule.kind != "constant":
        return (
            f'optimizer.kind = "{optimizer.variant}" with schedule.kind = "{schedule.kind}": it averages in the place '
            'of a decay of the rate; set schedule.kind = "constant" (with schedule.warmup_steps)'
        )
    if optimizer.keeps_average and optimizer.average is not None:
        return (
            f'optimizer.average with optimizer.kind = "{optimizer.variant}", which keeps an average of its own: leave '
            "optimizer.average out"
        )
    averages = optimizer.keeps_average or optimizer.average is not None
    if (averages or optimizer.lookahead is not None) and sync.replicas_are != "lockstep":
        what = "optimizer.lookahead" if not averages else "an average of weights (optimizer)"
        return (
            f'{what} with sync.kind = "{sync.variant}": what its replicas have between two agreements is not the '
            'model\'s; leave it out, or set sync.kind = "allreduce"'
        )
    return None


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


def _layers_rule(run_file: RunFile) -> str | None:
    own = run_file.optimizer
    if not isinstance(own, KFAC):
        return None
    return layers_refusal(run_file, f'optimizer.kind = "{own.variant}"', reduces=own.weight_sharing == "reduce")


def layers_refusal(run_file: RunFile, optimizer: str, *, reduces: bool) -> str | None:
    """One sentence if `optimizer`, which measures layers, does not see whole ones, in one backward, on all ranks.

    `reduces`: it takes all positions of a sample together.
    """
    found = next(_against_layers(run_file, reduces=reduces), None)
    return None if found is None else f"{found[0]} with {optimizer}: {found[1]}"


def _against_layers(run_file: RunFile, *, reduces: bool) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, schedule, sync = run_file.layout, run_file.pipeline.schedule, run_file.sync
    for axis in ("tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "it measures whole layers; split the model by shard"
    if layout.context > 1 and reduces:
        why = 'no rank has all positions of a sample; set optimizer.weight_sharing = "expand"'
        yield f"layout.context = {layout.context}", why
    if layout.pipeline > 1 and schedule not in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"):
        yield f"pipeline.schedule = {schedule!r}", "its backwards come in two parts, or are stale; use 1F1B"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', 'parameters are updated one after the other; use "order"'
    if sync.variant != "allreduce":
        yield f'sync.kind = "{sync.variant}"', 'ranks sum what they measure in every step; use "allreduce"'
    if run_file.elastic is not None:
        yield "[elastic]", "what ranks measure is not carried over a loss; leave one of the two out"
    if run_file.run.compile:
        yield run_file.run.compile_said, "compiled layers cannot be seen; leave run.compile out"
