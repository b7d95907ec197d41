"""Rules between `[sparsity]`, `[freeze]`, `[adapter]`, `[quantisation]`, `[distillation]` and the other tables.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from shoal.engine.config import CrossEntropy, Float8
from shoal.models.config import MoEConfig, PromptTuning
from shoal.models.huggingface.config import TransformersConfig
from shoal.optim.config import AdamW8bit
from shoal.runfile.run_file import RunFile
from shoal.sparsity.config import Grasp, TopKAST


def partly_trained_refusal(run_file: RunFile) -> str | None:
    """One sentence if what leaves a part of the model out cannot be put on what another table asks for."""
    rules = (_distillation_rule, _schedule_rule, _masks_rule, _freeze_rule, _sparse_layers_rule)
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
    if found is not None:
        return f'sparsity.kind = "{run_file.sparsity.variant}" with {found[0]}: {found[1]}; leave one of the two out'
    found = next(_against_products(run_file), None) if run_file.sparsity.products != "dense" else None
    return found and f'sparsity.products = "{run_file.sparsity.products}" with {found[0]}: {found[1]}; use "dense"'


def _against_products(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why layers cannot compute with the kept half of their weights)"""
    layout, memory = run_file.layout, run_file.memory
    if run_file.run.device == "cpu":
        yield 'run.device = "cpu"', "only GPUs from the A100 on have such products"
    if run_file.precision.variant not in ("bfloat16", "float16", "bfloat16_params"):
        yield f'precision.kind = "{run_file.precision.variant}"', "they are of numbers of 16 bits, such as bfloat16"
    if layout.tensor > 1:
        yield f"layout.tensor = {layout.tensor}", "layers that ranks split compute by themselves"
    if (layout.shard or 1) > 1 and memory.zero not in (1, 2):
        yield f"layout.shard = {layout.shard} and ZeRO-3", "weights are gathered for one forward and let go"
    if memory.offload.parameters != "device":
        yield f'memory.offload.parameters = "{memory.offload.parameters}"', "weights come for one forward and go"
    if run_file.run.compile is not False:
        yield run_file.run.compile_said, "a compiled program multiplies by itself"
    if run_file.quantisation is not None:
        yield "[quantisation]", "a layer computes in one way"


def _freeze_rule(run_file: RunFile) -> str | None:
    if run_file.freeze is not None and run_file.freeze.cache is not None:
        found = next(_against_cached_blocks(run_file), None)
        return found and f"freeze.cache with {found[0]}: {found[1]}; leave one of the two out"
    if run_file.freeze is None or not run_file.freeze.changes:
        return None
    key = "freeze.later" if run_file.freeze.later else "freeze.progress"
    found = next(_against_changes(run_file), None)
    if found is not None:
        return f"{key} with {found[0]}: {found[1]}; use freeze.layers, or leave one of the two out"
    found = next(_against_references(run_file), None)
    if found is not None:
        return f'freeze.progress.criterion = "activations" with {found[0]}: {found[1]}; use "movement"'
    progress, steps = run_file.freeze.progress, run_file.run.steps
    if progress is None or progress.first(steps) <= steps:
        return None
    return (
        f"[freeze.progress]: nothing can be frozen before step {progress.first(steps)}, and run.steps = {steps}: lower "
        "freeze.progress.every, patience or window"
    )


def _against_references(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why a rank cannot compute what blocks give by other weights)"""
    freeze, layout, memory = run_file.freeze, run_file.layout, run_file.memory
    if freeze is None or freeze.progress is None or freeze.progress.criterion != "activations":
        return
    for axis in ("pipeline", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "no rank has the whole model"
    if (layout.shard or 1) > 1 and memory.zero not in (1, 2):
        yield f"layout.shard = {layout.shard} and ZeRO-3", "no rank has the whole model"
    if memory.offload.parameters != "device":
        yield f'memory.offload.parameters = "{memory.offload.parameters}"', "no rank has the whole model"
    if run_file.run.compile is not False:
        yield run_file.run.compile_said, "a compiled program computes with its own weights"
    if run_file.batch.micro_samples == 1:
        yield "batch.micro_samples = 1", "it compares samples with each other"


def _against_cached_blocks(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why blocks cannot be left out, or give other things in each epoch)"""
    layout, model = run_file.layout, run_file.model
    if isinstance(model, MoEConfig):
        yield 'model.kind = "moe"', "a router that is not computed adds nothing to the loss, and its bias stands still"
    for key in ("dropout", "lora_dropout"):
        if getattr(model, key, 0.0):
            yield f"model.{key} = {getattr(model, key)}", "blocks drop other features in every epoch"
    if getattr(run_file.data, "augment", None):
        yield (
            f"data.augment = {json.dumps(run_file.data.augment)}",
            "each epoch has other samples, so that none is found",
        )
    for axis in ("pipeline", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "its ranks compute a block together"
    if run_file.run.compile is not False:
        yield run_file.run.compile_said, "a compiled program computes all blocks"
    if run_file.elastic is not None:
        yield "[elastic]", "a new membership builds its model anew"
    if run_file.sync.replicas_are != "lockstep":
        yield f'sync.kind = "{run_file.sync.variant}"', "ranks ask each other for samples before every forward"
    if run_file.batch.division != "even":
        yield f'batch.division = "{run_file.batch.division}"', "its ranks have other numbers of forwards"


def _sparse_layers_rule(run_file: RunFile) -> str | None:
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
    if isinstance(run_file.adapter, PromptTuning):
        axis = next((axis for axis in ("pipeline", "context") if getattr(run_file.layout, axis) > 1), None)
        if axis is not None or run_file.memory.loss_chunks > 1:
            key = "memory.loss_chunks" if axis is None else f"layout.{axis}"
            return f'adapter.kind = "prompt" with {key}: there, samples are as long as their targets; set {key} = 1'
    if isinstance(run_file.precision, Float8):
        return f'[{given[0]}] with precision.kind = "float8", whose layers do not have it; set it to "bfloat16"'
    if isinstance(model, TransformersConfig) and model.lora_rank is not None:
        return f"[{given[0]}] with model.lora_rank = {model.lora_rank}: leave one of the two out"
    return None


def _against_changes(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why what is trained cannot change in a run)"""
    sync = run_file.sync
    if sync.replicas_are != "lockstep":
        yield (f'sync.kind = "{sync.variant}"', "its replicas have no agreed gradient to leave a part out of")
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
    if isinstance(run_file.sparsity, Grasp) and run_file.observe.noise_every_steps:
        yield "observe.noise_every_steps", "it computes the gradient of a step three times"
    if isinstance(run_file.optimizer, AdamW8bit):
        yield 'optimizer.kind = "adamw_8bit"', "moments of masked weights share their scale with others"
    averages = run_file.optimizer.average is not None or run_file.optimizer.keeps_average
    if isinstance(run_file.sparsity, TopKAST) and averages:
        yield "an average of weights (optimizer)", "it would be of weights that wait, too, and dense"
    home = run_file.memory.offload.optimizer
    if home == "disk":
        yield f'memory.offload.optimizer = "{home}"', "state on disk cannot be set to zero where masks change"
    if home == "host" and run_file.sparsity is not None and run_file.sparsity.packed_state:
        yield 'memory.offload.optimizer = "host" and packed_state', "state lies on the host, or is packed on the device"
