"""The plan that a run file asks for, and the run file of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import tomli_w

from shoal.codec.config import CodecConfig
from shoal.config.check import checked
from shoal.config.load import apply, read
from shoal.cost.plan import Plan, Zero
from shoal.errors import LayoutError, ShoalError
from shoal.memory.closed_form import Activations, block_saved_bytes
from shoal.models.config import GPTConfig
from shoal.planner.search.candidates import Allowed
from shoal.runfile.layout_rules import microbatch_sizes
from shoal.runfile.rules import check_across, refusal
from shoal.runfile.run_file import RunFile
from shoal.runfile.training_rules import loss_chunks_refusal
from shoal.schedules.table import Schedule
from shoal.topology.cluster import Cluster
from shoal.topology.layout import Layout


def written_plan(run_file: RunFile, cluster: Cluster) -> Plan:
    """The plan that the run file itself asks for: that of the fullest rank, made-up samples included.

    Raises `LayoutError` where the devices cannot be so arranged.
    """
    _check_priced(run_file)
    layout = run_file.layout.layout(cluster.devices)
    pipelined = layout.pipeline > 1
    sizes = microbatch_sizes(run_file, shares=layout.replicate * layout.shard)
    zero = run_file.memory.zero or (3 if layout.shard > 1 else 0)
    return Plan(
        layout=layout,
        microbatch=sizes.samples,
        microbatches=sizes.rounds * sizes.in_flight,
        schedule=cast(Schedule, run_file.pipeline.schedule) if pipelined else "1F1B",
        virtual_stages=run_file.pipeline.stages_each if pipelined else 1,
        zero=cast(Zero, zero),
        recompute="full" if run_file.memory.recompute == "budget" else run_file.memory.recompute,
        recompute_share=_recomputed_share(run_file, layout, samples=sizes.samples, held=sizes.in_flight),
        loss_chunks=run_file.memory.loss_chunks,
        sequence_parallel=run_file.layout.sequence_parallel,
    )


def _recomputed_share(run_file: RunFile, layout: Layout, *, samples: int, held: int) -> float:
    """Of the blocks, those to which `memory.recompute` applies; of a user's model all.

    A budget is priced as whole blocks with as many bytes: its peak is theirs, and its time at most theirs.
    """
    memory, model = run_file.memory, run_file.model
    chosen, blocks = memory.recompute_layers, getattr(model, "layers", None)
    if memory.recompute == "budget":
        return _share_beyond_budget(run_file, layout, samples=samples, held=held)
    if memory.recompute == "none" or chosen is None or not blocks:
        return 1.0
    return len({layer for layer in chosen if layer < blocks}) / blocks


def _share_beyond_budget(run_file: RunFile, layout: Layout, *, samples: int, held: int) -> float:
    """Of what the blocks of a rank would save, the share that `memory.recompute_budget` has no room for. Raises
    `LayoutError` for models without a closed form.
    """
    model, sequence = run_file.model, run_file.batch.sequence
    if not isinstance(model, GPTConfig) or sequence is None:
        raise LayoutError(
            'memory.recompute = "budget": what blocks save has a closed form for model.kind = "gpt" and "moe" alone; '
            'plan with "full", whose peak is the least, or measure with memory.simulate_device'
        )
    tokens = samples * sequence // (layout.context * layout.tensor)
    size = 8 if run_file.precision.variant == "float64" else 2 if "16" in run_file.precision.variant else 4
    activations = Activations(tokens=tokens, element_bytes=size)
    most = block_saved_bytes(model, activations, kind="none") - block_saved_bytes(model, activations, kind="full")
    blocks = model.layers / layout.pipeline * (min(held, layout.pipeline) if layout.pipeline > 1 else 1)
    return max(0.0, 1 - run_file.memory.recompute_budget_bytes / max(1.0, most * blocks))


def _check_priced(run_file: RunFile) -> None:
    """Raises `LayoutError` for what runs, and has no closed form."""
    if run_file.layout.auto:
        raise LayoutError(
            "layout.auto = true: the run file asks for no plan; name the axes, or write what the planner picks with "
            "shoal plan RUN.toml --emit OUT.toml"
        )
    if run_file.pipeline.asynchronous:
        raise LayoutError(
            f"pipeline.schedule = {run_file.pipeline.schedule!r}: plans are priced with one update a step; set it to "
            '"1F1B", whose order is the same, for the time of a step without its updates'
        )
    offload = run_file.memory.offload
    elsewhere = offload.activations != "device" or offload.parameters != "device"
    if elsewhere or offload.activation_bits is not None:
        raise LayoutError(
            "memory.offload: plans are priced with parameters and all that blocks save on the device, as it was "
            "computed; leave activations, activation_bits and parameters out for an upper bound of the memory"
        )
    if offload.delay_update_after is not None:
        raise LayoutError(
            f"memory.offload.delay_update_after = {offload.delay_update_after}: plans are priced with updates between "
            "two steps; leave it out for an upper bound of the time"
        )
    if run_file.memory.budget is not None:
        raise LayoutError(
            "memory.budget: what it becomes is tried when the run starts; leave it out for the plan of the run without"
        )
    if run_file.layout.tensor_grid is not None:
        raise LayoutError(
            "layout.tensor_grid: plans are priced with matrices that are split along one side; leave it out for the "
            "time of that"
        )


LOSS_CHUNKS = 8
"""What a search tries: logits are then less than the activations of a block."""


def chunk_choices(run_file: RunFile) -> tuple[int, ...]:
    """Values of `memory.loss_chunks` that a search may choose: the run file's own, or none and some."""
    chunks = run_file.memory.loss_chunks
    if chunks > 1:
        return (chunks,)
    tried = msgspec.structs.replace(run_file.memory, loss_chunks=LOSS_CHUNKS)
    able = isinstance(run_file.model, GPTConfig)
    able = able and loss_chunks_refusal(msgspec.structs.replace(run_file, memory=tried)) is None
    return (1, LOSS_CHUNKS) if able else (1,)


def allowed_by(run_file: RunFile) -> Allowed:
    """What a search may choose, of all that a run file need not say."""
    return Allowed(loss_chunks=chunk_choices(run_file))


def with_plan(run_file: RunFile, plan: Plan) -> RunFile:
    """The same run by another plan, which need not be one that it can be run by."""
    replaced = msgspec.structs.replace
    sizes = plan.layout.to_dict()
    layout = replaced(
        run_file.layout, **sizes, sequence_parallel=plan.sequence_parallel, auto=False, replan=False, cluster=None
    )
    pipeline = run_file.pipeline
    if plan.layout.pipeline > 1:
        each = plan.virtual_stages if plan.virtual_stages > 1 else None
        pipeline = replaced(pipeline, schedule=plan.schedule, microbatches=plan.microbatches, stages_per_rank=each)
    zero = plan.zero if plan.zero and plan.layout.shard > 1 else None
    return replaced(
        run_file,
        run=replaced(run_file.run, processes=plan.world_size),
        batch=replaced(run_file.batch, micro_samples=plan.microbatch),
        layout=layout,
        pipeline=pipeline,
        memory=replaced(run_file.memory, zero=zero, recompute=plan.recompute, loss_chunks=plan.loss_chunks),
    )


def runnable(run_file: RunFile, cluster: Cluster) -> Callable[[Plan], bool]:
    """Says of a plan whether this version runs the run file by it, and by nothing else."""

    def legal(plan: Plan) -> bool:
        try:
            planned = with_plan(run_file, plan)
            return refusal(planned) is None and written_plan(planned, cluster) == plan
        except (ShoalError, ValueError):
            return False

    return legal


def with_codec(run_file: RunFile) -> Callable[[CodecConfig, Plan], bool]:
    """Says of a codec and a plan whether this version runs the run file by both."""

    def serves(codec: CodecConfig, plan: Plan) -> bool:
        try:
            return refusal(msgspec.structs.replace(with_plan(run_file, plan), codec=codec)) is None
        except (ShoalError, ValueError):
            return False

    return serves


def run_file_of(path: Path, plan: Plan, overrides: Iterable[str] = ()) -> str:
    """The run file at `path`, overrides included, with `plan` in it, as TOML.

    Raises:
        ConfigError: this version cannot run it.
    """
    tables = _with_plan(apply(read(path), overrides, RunFile), plan)
    result = checked(tables, RunFile, file="the planned run file")
    check_across(result, file="the planned run file")
    return tomli_w.dumps(tables)


def _with_plan(tables: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The same tables with the keys that a plan decides; keys at their defaults are left out."""
    layout = {axis: size for axis, size in plan.layout.to_dict().items() if size > 1}
    if plan.sequence_parallel:
        layout["sequence_parallel"] = True
    memory = {**tables.get("memory", {}), "recompute": plan.recompute, "loss_chunks": plan.loss_chunks}
    if plan.loss_chunks == 1:
        memory.pop("loss_chunks")
    memory.pop("zero", None)
    if plan.zero and plan.layout.shard > 1:
        memory["zero"] = plan.zero
    result = {**tables, "layout": layout, "memory": memory}
    result["run"] = {**tables.get("run", {}), "processes": plan.layout.world_size}
    result["batch"] = {**tables.get("batch", {}), "micro_samples": plan.microbatch}
    result.pop("pipeline", None)
    if plan.layout.pipeline > 1:
        result["pipeline"] = {"schedule": plan.schedule, "microbatches": plan.microbatches}
        if plan.virtual_stages > 1:
            result["pipeline"]["stages_per_rank"] = plan.virtual_stages
    return result
