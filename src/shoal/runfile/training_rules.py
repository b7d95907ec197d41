"""Rules between tables that say how a model is trained: masters, optimizer, norms, float8, loss. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.engine.config import BFloat16Params, CrossEntropy, Float8
from shoal.memory.config import OffloadConfig
from shoal.optim.config import groups_refusal, kinds_whose
from shoal.optim.kinds import Searching
from shoal.optim.matrix_kinds import KFAC
from shoal.runfile.run_file import RunFile, synchronises_norms

# Weights in bfloat16 with float32 masters, and what writes to weights, or reads them, as if there were one of each.


def masters_refusal(run_file: RunFile) -> str | None:
    """One sentence if another table does not know of master copies."""
    if not isinstance(run_file.precision, BFloat16Params):
        return None
    found = next(_against_masters(run_file, run_file.precision), None)
    return None if found is None else f'precision.kind = "bfloat16_params" with {found[0]}: {found[1]}'


def _against_masters(run_file: RunFile, precision: BFloat16Params) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    optimizer, sync, autocast = run_file.optimizer, run_file.sync, 'set precision.kind = "bfloat16"'
    if isinstance(optimizer, KFAC | Searching):
        why = "it measures curvature by differences that bfloat16 rounds away"
        yield f'optimizer.kind = "{optimizer.variant}"', f'{why}; set precision.kind = "float32"'
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', f"it updates the parameters that a forward is about to use; {autocast}"
    if run_file.pipeline.asynchronous:
        yield ('pipeline.schedule = "PipeDream"', f"its stages keep older weights, without masters; {autocast}")
    if sync.replicas_are != "lockstep":
        yield f'sync.kind = "{sync.variant}"', f"replicas agree on the weights that they compute with; {autocast}"
    if run_file.elastic is not None:
        yield "[elastic]", f"replicas give each other the weights that they compute with; {autocast}"
    for name in ("sparsity", "quantisation"):
        if getattr(run_file, name) is not None:
            yield f"[{name}]", f"it writes to weights, and knows of no masters; {autocast}"
    if run_file.freeze is not None and run_file.freeze.changes:
        yield "freeze.later or freeze.progress", f"it freezes weights that have masters; {autocast}"
    if precision.reduce_dtype != "float32" and run_file.codec.variant != "none":
        yield (
            f'precision.reduce_dtype = "bfloat16" and codec.kind = "{run_file.codec.variant}"',
            "both say what gradients become on the wire; leave one of the two out",
        )


# The rules between `[optimizer]` and the other tables. Imports no torch.


def optimizer_refusal(run_file: RunFile) -> str | None:
    """One sentence if another table takes from the optimizer what it needs."""
    rules = (_transforms_rule, _average_rule, _layers_rule, _search_rule, _width_rule)
    if (found := groups_refusal(run_file.optimizer)) is not None:
        return found
    return next((found for rule in rules if (found := rule(run_file)) is not None), None)


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
    if own.fisher == "sampled" and (found := next(_against_drawn_targets(run_file), None)) is not None:
        return f'{found[0]} with optimizer.fisher = "sampled": {found[1]}, or set it to "empirical"'
    return layers_refusal(run_file, f'optimizer.kind = "{own.variant}"', reduces=own.weight_sharing == "reduce")


def _against_drawn_targets(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do): where a forward has no second backward, or not all of its outputs."""
    layout, memory = run_file.layout, run_file.memory
    for axis in ("pipeline", "context"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", "no rank has all outputs; split the model by shard"
    if layout.shard > 1 and memory.zero in (None, 3):
        yield "memory.zero = 3", "weights come for one backward; use 1 or 2"
    if memory.recompute != "none":
        yield f'memory.recompute = "{memory.recompute}"', "a block is computed again for one backward; leave it out"
    if memory.loss_chunks > 1:
        yield f"memory.loss_chunks = {memory.loss_chunks}", "outputs are never there at once; leave it out"
    if memory.offload != OffloadConfig():
        yield "memory.offload", "what blocks save comes back for one backward; leave it out"


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


def _search_rule(run_file: RunFile) -> str | None:
    """One sentence if a line search does not see one loss and its exact gradient, the same on all ranks."""
    own = run_file.optimizer
    found = next(_against_search(run_file), None) if isinstance(own, Searching) else None
    return None if found is None else f'{found[0]} with optimizer.kind = "{own.variant}": {found[1]}'


def _against_search(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    sync, schedule = run_file.sync, run_file.schedule
    if schedule.kind != "constant":
        yield (
            f'schedule.kind = "{schedule.kind}"',
            'its line search finds how far to go; set schedule.kind = "constant"',
        )
    if sync.variant != "allreduce":
        yield f'sync.kind = "{sync.variant}"', 'all ranks search along one line; use "allreduce"'
    if run_file.elastic is not None:
        yield "[elastic]", "a rank lost in a search leaves the others on their way; leave one of the two out"
    if run_file.codec.variant != "none":
        yield f'codec.kind = "{run_file.codec.variant}"', "its gradient is not that of the loss; leave [codec] out"
    if run_file.layout.pipeline > 1 and run_file.pipeline.asynchronous:
        yield f"pipeline.schedule = {run_file.pipeline.schedule!r}", "stages are never at the same weights; use 1F1B"
    if run_file.gradients.schedule == "priority":
        yield 'gradients.schedule = "priority"', 'parameters are updated one after the other; use "order"'
    if run_file.precision.variant == "float16":
        yield 'precision.kind = "float16"', 'the loss is scaled; use "bfloat16" or "float32"'
    if run_file.observe.noise_every_steps:
        yield "observe.noise_every_steps", "a search has several gradients; leave one of the two out"
    if getattr(run_file.optimizer, "hessian", "differences") == "exact":
        yield from _against_second_derivatives(run_file)
    for name in ("sparsity", "freeze"):
        if getattr(run_file, name) is not None:
            yield f"[{name}]", "a search moves every weight; leave one of the two out"


def _against_second_derivatives(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, memory, differences = run_file.layout, run_file.memory, 'set optimizer.hessian = "differences"'
    for axis in ("tensor", "context", "pipeline", "expert"):
        if getattr(layout, axis) > 1:
            yield f"layout.{axis} = {getattr(layout, axis)}", f"its exchanges have no second derivative; {differences}"
    if layout.shard > 1 and memory.zero not in (1, 2):
        yield (
            f"layout.shard = {layout.shard} and ZeRO-3",
            "its weights are gathered for one backward; set memory.zero = 2",
        )
    if memory.recompute != "none":
        yield f'memory.recompute = "{memory.recompute}"', f"it computes one backward; {differences}"
    if memory.loss_chunks > 1:
        yield f"memory.loss_chunks = {memory.loss_chunks}", f"its gradient is there before the backward; {differences}"
    if run_file.run.compile:
        yield run_file.run.compile_said, "compiled code has no second derivative; leave run.compile out"


def _width_rule(run_file: RunFile) -> str | None:
    """muP needs an optimizer of which it is known how its rates follow the width."""
    own, key = run_file.optimizer, width_key(run_file)
    if key is None or own.width_rule is not None:
        return None
    return (
        f'model.{key} with optimizer.kind = "{own.variant}": its rates at other widths are not known; use '
        f"{kinds_whose(lambda table: table.width_rule is not None)}, or leave it out"
    )


def width_key(run_file: RunFile) -> str | None:
    """The key of `[model]` by which rates follow the width; None: they do not."""
    if getattr(run_file.model, "scaling", "standard") != "standard":
        return 'scaling = "mup"'
    return "base" if getattr(run_file.model, "base", {}) else None


# The rules between synchronised batch norms and the other tables. Imports no torch.


def norm_refusal(run_file: RunFile) -> str | None:
    """One sentence if ranks cannot take statistics together in every forward."""
    if not synchronises_norms(run_file.model):
        return None
    found = next(_against_synchronised(run_file), None)
    return None if found is None else f'model.batch_norm = "synchronised" with {found[0]}: {found[1]}'


def _against_synchronised(run_file: RunFile) -> Iterator[tuple[str, str]]:
    """(key and value, why not and what to do)"""
    layout, sync = run_file.layout, run_file.sync
    for axis in ("pipeline", "context", "tensor", "expert"):
        if getattr(layout, axis) > 1:
            why = "its ranks have to hold whole samples and all layers; use layout.replicate and layout.shard"
            yield f"layout.{axis} = {getattr(layout, axis)}", why
    if sync.replicas_are != "lockstep":
        why = 'replicas at different steps have no microbatch in common; set it to "allreduce"'
        yield f'sync.kind = "{sync.variant}"', why
    if run_file.sync.in_canonical_order:
        why = 'the samples of a microbatch follow the number of replicas; set model.batch_norm = "grouped"'
        yield 'sync.order = "canonical"', why
    if run_file.batch.division != "even":
        yield (
            f'batch.division = "{run_file.batch.division}"',
            "all ranks need as many microbatches; leave one of the two out",
        )
    if run_file.elastic is not None:
        why = 'the statistics follow the number of replicas, which changes; set model.batch_norm = "grouped"'
        yield "[elastic]", why
    if run_file.run.compile:
        yield run_file.run.compile_said, "a compiled forward holds no exchange between ranks; leave it out"


def float8_refusal(run_file: RunFile) -> str | None:
    """One sentence if a layer would have no product in float8."""
    if not isinstance(run_file.precision, Float8) or run_file.layout.tensor == 1:
        return None
    return (
        f'precision.kind = "float8" with layout.tensor = {run_file.layout.tensor}: layers that ranks split have no '
        'float8 products; set layout.tensor = 1, or precision.kind = "bfloat16"'
    )


def loss_chunks_refusal(run_file: RunFile) -> str | None:
    """One sentence if the loss cannot be taken of a part of the tokens at a time."""
    chunks, loss = run_file.memory.loss_chunks, run_file.loss
    if chunks == 1:
        return None
    if not isinstance(loss, CrossEntropy):
        return (
            f'memory.loss_chunks = {chunks} with loss.kind = "{loss.variant}": only the cross-entropy of each token is '
            "known to need no other token; leave memory.loss_chunks out"
        )
    if run_file.run.compile not in (False, "blocks"):
        return (
            f"memory.loss_chunks = {chunks} with {run_file.run.compile_said}: a compiled forward ends "
            'with its logits; leave one of the two out, or set run.compile = "blocks"'
        )
    return None
