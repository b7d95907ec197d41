"""The rules between `[sparsity]`, `[freeze]`, `[adapter]`, ... and the other tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.engine.config import CrossEntropy, Float8
from shoal.models.huggingface.config import TransformersConfig
from shoal.optim.config import AdamW8bit
from shoal.runfile.run_file import RunFile


def partly_trained_refusal(run_file: RunFile) -> str | None:
    """One sentence if what leaves a part of the model out cannot be put on what another table asks for."""
    rules = (_distillation_rule, _schedule_rule, _masks_rule, _freeze_rule, _layers_rule)
    return next((sentence for rule in rules if (sentence := rule(run_file)) is not None), None)


def _distillation_rule(run_file: RunFile) -> str | None:
    """The teacher is whole on every rank, and sees whole samples there."""
    layout = run_file.layout
    if run_file.distillation is None:
        return None
    split = next((axis for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) > 1), None)
    if split is not None:
        return (
            f"[distillation] with layout.{split} = {getattr(layout, split)}: no rank has whole logits beside its "
            "teacher's; use layout.shard or replicate"
        )
    if not isinstance(run_file.loss, CrossEntropy):
        return (
            f'[distillation] with loss.kind = "{run_file.loss.variant}": a teacher gives classes; use "cross_entropy"'
        )
    if run_file.memory.loss_chunks > 1 or run_file.run.compile not in (False, "blocks"):
        key = "memory.loss_chunks" if run_file.memory.loss_chunks > 1 else "run.compile"
        return f"[distillation] with {key}: the logits are not there to be compared with the teacher's; leave it out"
    return None


def _schedule_rule(run_file: RunFile) -> str | None:
    config, steps = run_file.sparsity, run_file.run.steps
    if config is None or config.starts_sparse:
        return None
    for key, value in (("begin", config.schedule.begin), ("end", config.schedule.end or 0)):
        if value > steps:
            return (
                f"sparsity.schedule.{key} = {value} with run.steps = {steps}: the run would end before it has its "
                "density; lower it, or raise run.steps"
            )
    return None


def _masks_rule(run_file: RunFile) -> str | None:
    if run_file.sparsity is None:
        return None
    found = next(iter((*_against_changes(run_file), *_against_masks(run_file))), None)
    kind = run_file.sparsity.variant
    return found and f'sparsity.kind = "{kind}" with {found[0]}: {found[1]}; leave one of the two out'


def _freeze_rule(run_file: RunFile) -> str | None:
    if run_file.freeze is None or not run_file.freeze.changes:
        return None
    key = "freeze.later" if run_file.freeze.later else "freeze.progress"
    found = next(_against_changes(run_file), None)
    return found and f"{key} with {found[0]}: {found[1]}; use freeze.layers, or leave one of the two out"


def _layers_rule(run_file: RunFile) -> str | None:
    """Adapters and rounding are in linear layers, which other tables replace by their own."""
    model = run_file.model
    tables = {"adapter": run_file.adapter, "quantisation": run_file.quantisation}
    given = [name for name, table in tables.items() if table is not None]
    if not given:
        return None
    if len(given) > 1:
        return "[adapter] with [quantisation]: a layer has one of both; leave one of the two out"
    if run_file.layout.tensor > 1:
        return (
            f"[{given[0]}] with layout.tensor = {run_file.layout.tensor}: layers that ranks split do not have it; set "
            "layout.tensor = 1"
        )
    if isinstance(run_file.precision, Float8):
        return f'[{given[0]}] with precision.kind = "float8", whose layers do not have it; set it to "bfloat16"'
    if isinstance(model, TransformersConfig) and model.lora_rank is not None:
        return f"[{given[0]}] with model.lora_rank = {model.lora_rank}: leave one of the two out"
    return None


def _against_changes(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why what is trained cannot change in a run)"""
    sync = run_file.sync
    if sync.replicas_are != "lockstep":
        yield (
            f'sync.kind = "{sync.variant}"',
            "its replicas have no agreed gradient to leave a part out of",
        )
    if run_file.elastic is not None:
        yield "[elastic]", "what is left out is not carried from one membership to the next"
    if run_file.codec.variant != "none":
        yield f'codec.kind = "{run_file.codec.variant}"', "replicas send less of their gradients already"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', "weights are updated before the whole gradient is there"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f'pipeline.schedule = "{run_file.pipeline.schedule}"', "stages are never at the same gradient"
    if run_file.optimizer.sends_momentum:
        yield f'optimizer.kind = "{run_file.optimizer.variant}"', "its ranks sum momenta of the whole model"


def _against_masks(run_file: RunFile) -> Iterator[tuple[str, str]]:
    if isinstance(run_file.optimizer, AdamW8bit):
        yield 'optimizer.kind = "adamw_8bit"', "moments of masked weights share their scale with others"
