"""What a layout asks of the model and of the batch, checked before any process starts.

Each rule gives one sentence, which names the number that does not divide and the nearest ones that do, or None.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import ShoalError
from shoal.models.config import GPTConfig, MoEConfig, PythonModel
from shoal.recipes.rules.divisible import divides, divides_or_divided, not_multiple
from shoal.recipes.rules.grid import grid_refusal
from shoal.recipes.rules.pipedream import pipedream_refusal
from shoal.recipes.run_file import RunFile
from shoal.schedules.build import build

Rule = Callable[[RunFile], str | None]


def layout_refusal(run_file: RunFile) -> str | None:
    """The first rule that is broken, as a sentence."""
    return next((sentence for rule in _RULES if (sentence := rule(run_file)) is not None), None)


def _only_chains(run_file: RunFile) -> str | None:
    """Models that cannot be split along an axis: those that are neither a GPT nor the user's own."""
    layout, model = run_file.layout, run_file.model
    if isinstance(model, GPTConfig | PythonModel):
        return None
    kind = type(model).__struct_config__.tag
    for axis in ("pipeline", "context", "tensor"):
        size = getattr(layout, axis)
        if size > 1:
            return f'layout.{axis} = {size}: a model of kind "{kind}" cannot be split so; use layout.shard or replicate'
    return None


def _heads(run_file: RunFile) -> str | None:
    model, tensor = run_file.model, run_file.layout.tensor
    if not isinstance(model, GPTConfig):
        return None
    return divides("layout.tensor", tensor, "model.heads", model.heads) or divides_or_divided(
        "layout.tensor", tensor, "model.kv_heads", model.key_value_heads
    )


def _feed_forward(run_file: RunFile) -> str | None:
    """On a grid its panels have to come out, which is less: see `grid_rule`."""
    layout, model = run_file.layout, run_file.model
    if not isinstance(model, GPTConfig) or layout.tensor_grid is not None:
        return None
    return divides("layout.tensor", layout.tensor, "model.feed_forward_width", model.hidden_width)


def _experts(run_file: RunFile) -> str | None:
    model, layout = run_file.model, run_file.layout
    if not isinstance(model, MoEConfig):
        if layout.expert == 1 or isinstance(model, PythonModel):
            return None
        return f'layout.expert = {layout.expert} splits experts, and the model has none: set model.kind = "moe"'
    shared = model.shared_experts * model.width_of_expert
    return divides("layout.expert", layout.expert, "model.experts", model.experts) or divides(
        "layout.tensor", layout.tensor, "shared_experts x expert_width", shared
    )


def _sequence(run_file: RunFile) -> str | None:
    layout, sequence = run_file.layout, run_file.batch.sequence
    if not isinstance(run_file.model, GPTConfig):
        return None
    if layout.context > 1 and sequence % (2 * layout.context):
        return not_multiple(
            "batch.sequence", sequence, 2 * layout.context, f"2 x layout.context = {2 * layout.context}"
        )
    own = sequence // layout.context
    if layout.sequence_parallel and own % layout.tensor:
        unit = layout.context * layout.tensor
        return not_multiple("batch.sequence", sequence, unit, f"layout.context x layout.tensor = {unit}")
    return None


def _ulysses(run_file: RunFile) -> str | None:
    layout, model = run_file.layout, run_file.model
    if not isinstance(model, GPTConfig) or run_file.context.kind != "ulysses":
        return None
    return divides("layout.context", layout.context, "heads per tensor rank", model.heads // layout.tensor)


def _stages(run_file: RunFile) -> str | None:
    layout, model, pipeline = run_file.layout, run_file.model, run_file.pipeline
    stages = layout.pipeline * pipeline.stages_each
    if layout.pipeline == 1 or not isinstance(model, GPTConfig) or stages <= model.layers + 2:
        return None
    return (
        f"layout.pipeline = {layout.pipeline} x {pipeline.stages_each} stages each makes {stages} stages, "
        f"and the model has {model.layers + 2} parts (embedding, {model.layers} layers, head): use fewer stages, or "
        "more model.layers"
    )


def _schedule(run_file: RunFile) -> str | None:
    ranks, pipeline = run_file.layout.pipeline, run_file.pipeline
    if ranks == 1 or pipeline.asynchronous:
        return None
    microbatches = pipeline.microbatches or 2 * ranks
    try:
        build(pipeline.schedule, ranks=ranks, microbatches=microbatches, stages_per_rank=pipeline.stages_per_rank)
    except ShoalError as error:
        return str(error)
    return None


def _compiled(run_file: RunFile) -> str | None:
    """`torch.compile` cannot trace through collectives, nor a model whose parts are called one by one."""
    layout = run_file.layout
    if not run_file.run.compile:
        return None
    inside = [axis for axis in ("tensor", "context", "expert", "pipeline") if getattr(layout, axis) > 1]
    if layout.shard > 1 and run_file.memory.zero in (None, 3):
        inside.append("shard (with memory.zero = 3)")
    if not inside:
        return None
    return f"run.compile = true with layout.{inside[0]}: a split model cannot be compiled; leave run.compile out"


def _zero(run_file: RunFile) -> str | None:
    """Among copies nothing is split; a run of one copy on one rank may say what more of them would do."""
    layout, zero = run_file.layout, run_file.memory.zero
    processes = run_file.run.processes or layout.default_processes or 1
    if zero is None or layout.auto or layout.shard > 1 or processes == layout.pipeline * layout.context * layout.tensor:
        return None
    return (
        f"memory.zero = {zero} splits the model's state over layout.shard, which is 1: set layout.shard to the "
        "number of ranks that share one copy (layout.replicate to the number of copies), or leave memory.zero out"
    )


def _auto(run_file: RunFile) -> str | None:
    """The planner picks among plans that have a price."""
    layout, pipeline = run_file.layout, run_file.pipeline
    if not layout.auto:
        return None
    if layout.tensor_grid is not None:
        return "layout.auto = true with layout.tensor_grid: a grid has no price; leave one of the two out"
    if pipeline.asynchronous:
        return (
            f"layout.auto = true with pipeline.schedule = {pipeline.schedule!r}: it has no price, because it updates "
            "within a step; leave one of the two out"
        )
    return None


_RULES: tuple[Rule, ...] = (
    _auto,
    _only_chains,
    _heads,
    _feed_forward,
    _experts,
    _sequence,
    grid_refusal,
    _ulysses,
    _schedule,
    pipedream_refusal,
    _stages,
    _compiled,
    _zero,
)
