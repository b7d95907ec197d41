"""From the tables `[layout]`, `[pipeline]`, `[context]` and `[memory]` to this rank's part of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.comm.collective import exchanged
from shoal.comm.mesh import Mesh
from shoal.cost.activations import in_flight
from shoal.engine.compute import (
    Compute,
    Cut,
    LossPrograms,
    compile_blocks,
    compute_gradients_with_losses,
    gathered_outputs,
    loss_of_logits,
    uncut,
)
from shoal.engine.forward_backward import (
    ForwardBackward,
    PipelinedForwardBackward,
    SequentialForwardBackward,
    as_they_are,
    evaluating,
)
from shoal.engine.loss import Distillation, Loss, call_model
from shoal.engine.microbatches import GlobalBatch, Uniform, cut_sequences
from shoal.engine.precision import Precision, use_float8
from shoal.engine.randomness import Randomness
from shoal.memory.recompute import check_recompute, recompute
from shoal.memory.recompute_budget import Exchange
from shoal.models.adapters import BypassWatch, refuse_bypassed_layers
from shoal.models.config import ForeignModel
from shoal.models.draw_watch import draws_nothing, key_checkpoints, repeats_alike
from shoal.models.keyed_draws import Extent, KeyedDraws, Slices
from shoal.models.roles import DeclaresParts
from shoal.parallel.context.core import positions
from shoal.parallel.pipeline.stages import Stages, balanced_cut, cut_at, estimated_costs, staged
from shoal.parallel.split import Split, split_model
from shoal.runfile.layout_rules import microbatch_sizes
from shoal.runfile.run_file import RunFile, default_micro_samples, synchronises_norms
from shoal.schedules.build import build
from shoal.schedules.table import Schedule, ScheduleTable
from shoal.state import Trained
from shoal.topology.layout import Axis, Layout

# How a rank's samples of a step become microbatches.
#
# Replicas of one rank take their samples as they come: uneven shares are legal, because the loss is a sum. Ranks that
# exchange tensors inside of every microbatch (those that share a replica, and all where batch norms are synchronised)
# must have as many, of one size. A loss that couples samples sees those of all ranks where the global batch is one
# microbatch of each.


@dataclass(frozen=True)
class Microbatching:
    """Samples of one microbatch (None: all of a rank's at once), and how they are made alike where they must be.

    `in_flight` is the number of microbatches that go through a pipeline together; 1 without one. Asynchronous pipelines
    drain only between steps: there it is all of a step's.
    """

    samples: int | None
    uniform: Uniform | None
    in_flight: int


def microbatching(run_file: RunFile, layout: Layout) -> Microbatching:
    """What the run file and the layout make of it."""
    shares_cache = layout.world_size > 1 and run_file.freeze is not None and run_file.freeze.cache is not None
    if layout.replica_size == 1 and not (synchronises_norms(run_file.model) or shares_cache):
        return Microbatching(default_micro_samples(run_file), None, 1)
    sizes = microbatch_sizes(run_file, shares=layout.replicate * layout.shard)
    counts = {sizes.rounds * sizes.in_flight}
    for smaller in run_file.batch.smaller_sizes:
        rounds = -(-(smaller // (layout.replicate * layout.shard)) // (sizes.samples * sizes.in_flight))
        counts.add(rounds * sizes.in_flight)
    return Microbatching(sizes.samples, Uniform(sorted(counts), sizes.samples), sizes.in_flight)


def global_batch_of(run_file: RunFile, mesh: Mesh) -> GlobalBatch:
    """What a loss that couples samples sees of other ranks."""
    refusal = None
    if mesh.layout.context > 1:
        refusal = "under layout.context every rank has a part of each sample; set it to 1"
    elif mesh.layout.pipeline > 1:
        refusal = "a pipeline computes the global batch in microbatches, one after the other; set layout.pipeline to 1"
    elif run_file.sync.replicas_are != "lockstep":
        kind = run_file.sync.variant
        refusal = f'sync.kind = "{kind}" has replicas at different steps, without a common batch; set it to "allreduce"'
    samples = run_file.batch.global_samples
    return GlobalBatch(lambda: mesh.axis("replicate", "shard", lane="samples"), samples=samples, refusal=refusal)


def held_at_once(run_file: RunFile, mesh: Mesh, microbatches: int) -> int:
    """Microbatches whose activations this rank of a pipeline holds at its peak."""
    pipeline = run_file.pipeline
    schedule = "1F1B" if pipeline.asynchronous else pipeline.schedule  # PipeDream has its order
    held = in_flight(
        cast(Schedule, schedule),
        mesh.layout.index("pipeline", mesh.rank),
        pipeline=mesh.layout.pipeline,
        virtual_stages=pipeline.stages_each,
        microbatches=microbatches,
    )
    return math.ceil(held)


# What keys the random numbers of a run's model.


def draws_of(
    run_file: RunFile, model: nn.Module, *, one_at_a_time: bool = True, own_loop: bool = False
) -> KeyedDraws | None:
    """The mode that keys what a user's module draws; None for Shoal's own, for one that draws nothing, and for one that
    is compiled. An `own_loop` may draw beside a model that draws nothing, which is called without the mode.
    """
    nothing = draws_nothing(model)
    if not isinstance(run_file.model, ForeignModel) or run_file.run.compile or (nothing and not own_loop):
        return None
    key_checkpoints()
    draws = KeyedDraws(model, seed=run_file.run.seed, one_at_a_time=one_at_a_time)
    if nothing:
        draws.sleep()
    return draws


CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called themselves."""


@dataclass(frozen=True)
class Divided:
    """A rank's part of the model; `table` and `stages` where it is some stages of a pipeline."""

    split: Split
    table: ScheduleTable | None
    stages: Stages | None


def table_of(run_file: RunFile, in_flight: int) -> ScheduleTable | None:
    """The schedule of the pipeline; None without one. Raises `LayoutError` where the schedule refuses the sizes."""
    ranks, pipeline = run_file.layout.pipeline, run_file.pipeline
    if ranks == 1:
        return None
    return build(pipeline.schedule, ranks=ranks, microbatches=in_flight, stages_per_rank=pipeline.stages_per_rank)


def divided(run_file: RunFile, model: nn.Module, mesh: Mesh, *, in_flight: int) -> Divided:
    """Leaves in `model`, in place, this rank's part of it, with what is computed again in the backward."""
    memory = run_file.memory
    check_recompute(model, memory.recompute, layers=memory.recompute_layers)
    table = table_of(run_file, in_flight)
    stages = None if table is None else _stages(model, table, by_hand=run_file.pipeline.cut)
    split = split_model(
        model,
        mesh,
        stages=stages,
        sequence_parallel=run_file.layout.sequence_parallel,
        context=run_file.context.kind,
        grid_rows=None if run_file.layout.tensor_grid is None else run_file.layout.tensor_grid[0],
    )
    use_float8(model, run_file.precision, device=mesh.device)
    held = 1 if table is None else held_at_once(run_file, mesh, table.microbatches)
    recompute(
        model,
        memory.recompute,
        layers=memory.recompute_layers,
        budget_bytes=memory.recompute_budget_bytes // held,
        exchange=_exchange(run_file, mesh) if memory.recompute == "budget" else None,
        looks_again=not _mixes_inputs(run_file),
    )
    return Divided(split, table, stages)


def _mixes_inputs(run_file: RunFile) -> bool:
    """Whether blocks exchange something with ranks whose inputs may have other sizes."""
    layout = run_file.layout
    parts = layout.context > 1 or (layout.sequence_parallel and layout.tensor > 1)
    return parts or layout.expert > 1 or synchronises_norms(run_file.model)


def _exchange(run_file: RunFile, mesh: Mesh) -> Exchange | None:
    """Among the ranks that blocks exchange something with; None where there are none."""
    axes: tuple[Axis, ...] = ("tensor",)
    if _mixes_inputs(run_file):
        norms = synchronises_norms(run_file.model)
        axes = ("replicate", "shard", "context", "tensor") if norms else ("shard", "context", "tensor")
    group = mesh.axis(*axes)
    if group.size == 1:
        return None
    return lambda own: exchanged(own, group, mesh.device)  # copied with the module, unlike what a partial holds


def trained_in(parts: Divided) -> list[Trained]:
    """The parameters that this rank trains, and where each stands in the unsplit model."""
    return [Trained(holding, p) for holding, p in parts.split.held if p.requires_grad]


def build_forward_backward(
    run_file: RunFile,
    parts: Divided,
    mesh: Mesh,
    *,
    loss: Loss,
    precision: Precision,
    microbatching: Microbatching,
    programs: LossPrograms | None = None,
    distillation: Distillation | None = None,
    own_loop: bool = False,
) -> ForwardBackward:
    """Forward and backward of this rank's part. `programs` are what its model and the loss were compiled to; an
    `own_loop` calls the model itself.
    """
    model, arrange = parts.split.model, microbatching.uniform or as_they_are
    draws = draws_of(run_file, model, one_at_a_time=parts.table is None, own_loop=own_loop)
    if draws is not None:
        draws.slices = _slices(parts, mesh, sequence_parallel=run_file.layout.sequence_parallel)
    randomness = Randomness(
        model,
        seed=run_file.run.seed,
        replica=mesh.batch_share[0],
        draws=draws,
        may_sleep=_repeatable(run_file, parts, mesh),
    )
    vocabulary, table = parts.split.vocabulary, parts.table
    last = table is None or table.placement[table.last_stage] == mesh.layout.index("pipeline", mesh.rank)
    compute = Compute(
        model,
        loss_of_logits(loss, vocabulary, mesh, model=model if last else None, chunks=run_file.memory.loss_chunks),
        precision,
        mesh.device,
        randomness,
        cut=_cut(mesh),
        gathered=gathered_outputs(vocabulary, mesh),
        global_batch=global_batch_of(run_file, mesh),
        programs=programs,
        distillation=distillation,
    )
    first = mesh.layout.index("tensor", mesh.rank) == 0
    if table is None:
        compute_gradients_with_losses(compute)
    stages = _refuse_bypassed_layers(run_file, parts, compute, own_loop=own_loop)
    if table is None or stages is None:
        return SequentialForwardBackward(compute, arrange, counts=first)
    pipeline = mesh.axis("pipeline")
    return PipelinedForwardBackward(
        compute,
        table,
        stages,
        arrange,
        group=pipeline,
        messages=mesh.messages("pipeline", pairs=table.pairs),
        counts=first and last,
        splits=run_file.memory.recompute not in ("operators", "full", "budget") and run_file.memory.loss_chunks == 1,
        codec=run_file.pipeline.stage_codec,
    )


# Layers with adapters or rounded weights that a model passes by (`shoal.models.adapters.BypassWatch`) are refused in a
# first forward. No mode can look into a program: what is compiled is computed once more before that, as it is, in
# evaluation and without gradients, so that the step itself computes and draws what any other does.


def _refuse_bypassed_layers(run_file: RunFile, parts: Divided, compute: Compute, *, own_loop: bool) -> Stages | None:
    """The stages of `parts`, which look at what they compute first."""
    model, table = parts.split.model, "adapter" if run_file.quantisation is None else "quantisation"
    watch = BypassWatch(model, table=table)
    if not watch.layers:
        return parts.stages
    look = partial(_look, watch, model, compute.device)
    if parts.stages is not None:
        watched = (replace(part, run=_watched(part.run, watch)) for part in parts.stages.parts)
        return replace(parts.stages, parts=tuple(watched))
    if model._compiled_call_impl is not None:
        model._compiled_call_impl = _looking(model, look)
    elif run_file.run.compile is not False and not own_loop:
        compute.first.append(lambda inputs: look(partial(call_model, model, inputs)))
    else:
        refuse_bypassed_layers(model, table=table)
    return None


Look = Callable[[Callable[[], object]], None]
"""Of a forward that it computes."""


def _look(watch: BypassWatch, model: nn.Module, device: torch.device, forward: Callable[[], object]) -> None:
    devices = [] if device.type == "cpu" else [device]
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices), watch:
        forward()


def _watched(run: Callable[[Any, Any], Tensor], watch: BypassWatch) -> Callable[[Any, Any], Tensor]:
    """A part of a chain, which is not compiled, that goes through `watch` when it runs first."""
    is_first = [True]

    def watched(x: Any, context: Any) -> Tensor:
        if not is_first:
            return run(x, context)
        is_first.clear()
        with watch:
            return run(x, context)

    return watched


def _looking(model: nn.Module, look: Look) -> Callable[..., Any]:
    """What calls a model that is compiled as a whole, with a `look` before the first call."""
    compiled = model._compiled_call_impl
    assert compiled is not None, "it is compiled"

    def first(*args: Any, **named: Any) -> Any:
        model._compiled_call_impl = compiled
        look(partial(model._call_impl, *args, **named))
        return compiled(*args, **named)

    return first


def compiled(run_file: RunFile, parts: Divided, mesh: Mesh, *, loss: Loss, own_loop: bool) -> LossPrograms | None:
    """Compiles what `run.compile` says, in place, and the loss with it, unless that is the script's, comes in chunks or
    asks a teacher. None where nothing is compiled that the step has to call otherwise.
    """
    said, options, model = run_file.run.compile, run_file.run.compile_options, parts.split.model
    if said is False:
        return None
    whole = said != "blocks"
    if not whole:
        compile_blocks(blocks_in(model, parts.stages, mesh.layout.index("pipeline", mesh.rank)), options)
    elif own_loop:
        model.compile(**options)
    apart = own_loop or run_file.memory.loss_chunks > 1 or run_file.distillation is not None
    return None if apart else LossPrograms(model, loss, whole=whole, options=options)


def _repeatable(run_file: RunFile, parts: Divided, mesh: Mesh) -> bool:
    """Can this rank repeat a forward by itself? Ranks exchange nothing in one, and it adds nothing up."""
    layout = mesh.layout
    whole = parts.table is None and layout.tensor == layout.context == layout.expert == 1
    away = run_file.memory.offload.parameters != "device"
    gathers = away or (layout.shard > 1 and run_file.memory.zero not in (1, 2))
    exchanges = gathers or synchronises_norms(run_file.model)
    return whole and not exchanges and repeats_alike(parts.split.model)


def _slices(parts: Divided, mesh: Mesh, *, sequence_parallel: bool) -> Slices:
    """What this rank holds of each sample: places of the sequence, and features between split layers."""
    size, rank = mesh.layout.context, mesh.layout.index("context", mesh.rank)
    tensor, place = mesh.axis("tensor"), mesh.layout.index("tensor", mesh.rank)
    sliced = tensor.size if sequence_parallel else 1

    def sequence(tokens: int) -> dict[int, Extent]:
        if size * sliced == 1 or not tokens:
            return {}
        places = positions(tokens * size, size=size, rank=rank)
        found = {tokens: Extent(places, tokens * size)}
        if tokens % sliced == 0:
            each = tokens // sliced
            found[each] = Extent(places[place * each : (place + 1) * each], tokens * size)
        return found

    split = parts.split
    return Slices(sequence, split.columns, split.rows)


def blocks_in(model: nn.Module, stages: Stages | None, rank: int) -> list[nn.Module]:
    """The modules that ZeRO-3 gathers one after the other: the blocks of the chain that this rank holds.

    A model that declares no chain has its blocks in `nn.ModuleList`s, or in `nn.Sequential`s of modules that have
    submodules, however deep these lie (`transformer.h`, `model.layers`, `layer1`).
    """
    if not isinstance(model, DeclaresParts):
        return list(dict.fromkeys(_called_blocks(model)))
    held = range(len(model.parts())) if stages is None else _held_parts(stages, rank)
    parts = model.parts()
    return [model.get_submodule(parts[i].modules[0]) for i in held if 0 < i < len(parts) - 1]


def with_inner(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """`blocks`, and the blocks that lie in them: a stage of a Swin or of a ResNet is a block that holds others."""
    found: list[nn.Module] = []
    for block in blocks:
        found += [block, *with_inner(list(_called_blocks(block)))]
    return list(dict.fromkeys(found))


def _called_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Containers are never called themselves, what they hold is."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from _contents(child)
        elif isinstance(child, nn.Sequential) and any(True for block in child for _ in block.children()):
            yield from child
        else:
            yield from _called_blocks(child)


def _contents(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        yield from _contents(child) if isinstance(child, CONTAINERS) else (child,)


def _stages(model: nn.Module, table: ScheduleTable, *, by_hand: Sequence[str] | None) -> Stages:
    parts = list(model.parts()) if isinstance(model, DeclaresParts) else []
    if not parts:
        return staged(model, (), table.placement)  # refuses: the model is no chain
    names = [part.name for part in parts]
    if by_hand is not None:
        cut = cut_at(names, by_hand, stages=table.stages)
    else:
        cut = balanced_cut(estimated_costs(model, parts), table.stages)
    return staged(model, cut, table.placement)


def _held_parts(stages: Stages, rank: int) -> list[int]:
    return [part for stage, parts in enumerate(stages.cut) if stages.placement[stage] == rank for part in parts]


def _cut(mesh: Mesh) -> Cut:
    """What a rank keeps of every sample: all, or its places of the sequence."""
    size, place = mesh.layout.context, mesh.layout.index("context", mesh.rank)
    if size == 1:
        return uncut
    return cut_sequences(lambda tokens: positions(tokens, size=size, rank=place))
