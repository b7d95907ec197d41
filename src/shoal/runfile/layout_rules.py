"""What a layout asks of the model and of the batch, checked before any process starts.

Each rule returns one sentence that names the number that does not divide and the nearest ones that do, or None.
`layout.tensor_grid` asks that every column of the grid has whole heads of each kind, every row equally many tokens, and
all panels of a matrix one width (`shoal.parallel.tensor.summa`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import lcm

from shoal.errors import ShoalError
from shoal.models.attention_config import BlockLists
from shoal.models.config import ForeignModel, GPTConfig, MoEConfig, attention_mask_of
from shoal.models.huggingface.config import TransformersConfig, experts_of
from shoal.runfile import facts
from shoal.runfile.facts import Fact
from shoal.runfile.rule import Rule, against, axes, in_order
from shoal.runfile.run_file import RunFile, default_micro_samples, statistics_group
from shoal.schedules.build import build
from shoal.topology.refusal import nearest_divisors, nearest_multiples


def divides(axis: str, size: int, name: str, number: int) -> str | None:
    """`size` of `axis` must divide `number`, which is called `name`."""
    if number % size == 0:
        return None
    divisors = " or ".join(map(str, nearest_divisors(number, size)))
    multiples = " or ".join(map(str, nearest_multiples(size, number)))
    return f"{axis} = {size} does not divide {name} = {number}; nearest: {axis} = {divisors}, or {name} = {multiples}"


def divides_or_divided(axis: str, size: int, name: str, number: int) -> str | None:
    """Fewer heads than ranks are held by several ranks each, so the larger must be a multiple of the smaller."""
    return None if size % number == 0 else divides(axis, size, name, number)


def not_multiple(name: str, number: int, unit: int, what: str) -> str:
    """`number` is no multiple of `unit`, which is that of `what`."""
    nearest = " or ".join(map(str, nearest_multiples(unit, number)))
    return f"{name} = {number} is not a multiple of {what}; nearest: {nearest}"


def grid_refusal(run_file: RunFile) -> str | None:
    """Why this grid cannot be, as a sentence; None where it can, and without one."""
    layout, model, grid = run_file.layout, run_file.model, run_file.layout.tensor_grid
    if grid is None:
        return None
    rows, columns = grid
    written, panels = f"layout.tensor_grid = [{rows}, {columns}]", lcm(rows, columns)
    if rows * columns != layout.tensor:
        return f"{written} has {rows * columns} places for layout.tensor = {layout.tensor}: make them as many"
    if not isinstance(model, GPTConfig):
        return None
    heads = model.key_value_heads
    if heads % layout.tensor and (heads % columns or rows % (heads // columns)):
        return (
            f"{written} with model.kv_heads = {heads}: they are a multiple of {layout.tensor}, or {columns} (columns) "
            f"times a divisor of {rows} (rows); nearest: {_either(_kv_heads_on(rows, columns, model.heads), heads)}"
        )
    # The width divides already: it is that of heads, of which every rank has as many.
    features = heads * model.size_of_head
    sides = {"model.feed_forward_width": model.hidden_width, "keys' features": features}
    for name, side in sides.items():
        if side % panels:
            return not_multiple(name, side, panels, f"the {panels} panels of {written}")
    own = run_file.batch.sequence // layout.context
    if own % rows:
        unit = layout.context * rows
        return not_multiple("batch.sequence", run_file.batch.sequence, unit, f"layout.context x rows = {unit}")
    return None


def _kv_heads_on(rows: int, columns: int, heads: int) -> list[int]:
    """The numbers of key and value heads that lie evenly on a grid."""
    size = rows * columns
    fitting = (n for n in range(1, heads + 1) if heads % n == 0)
    return [n for n in fitting if n % size == 0 or (n % columns == 0 and rows % (n // columns) == 0)]


def _either(numbers: list[int], wanted: int) -> str:
    return " or ".join(map(str, sorted(sorted(numbers, key=lambda n: abs(n - wanted))[:2])))


def _only_chains(run_file: RunFile) -> str | None:
    """Models that cannot be split along an axis: those that are neither a GPT nor the user's own."""
    layout, model = run_file.layout, run_file.model
    if isinstance(model, GPTConfig | ForeignModel):
        return None
    kind = model.variant
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


def _sparse_attention(run_file: RunFile) -> str | None:
    """Context ranks fetch whole blocks of keys, each from one rank; lists have an end."""
    mask, context = attention_mask_of(run_file.model), run_file.layout.context
    if isinstance(mask, BlockLists) and run_file.batch.sequence > mask.tokens:
        return (
            f"model.attention.kept has {len(mask.kept)} lists of blocks of {mask.block} tokens, and batch.sequence = "
            f"{run_file.batch.sequence}: give {-(-run_file.batch.sequence // mask.block)} lists"
        )
    if mask is not None and mask.form == "flex" and run_file.run.device == "cpu":
        return (
            'model.attention.form = "flex" with run.device = "cpu": FlexAttention has no backward there; leave form '
            "out, or choose another device"
        )
    if mask is not None and mask.form == "flex" and context > 1 and run_file.context.kind != "ulysses":
        return (
            f'model.attention.form = "flex" with layout.context = {context}: ranks compute with the blocks that they '
            'have fetched; leave form out, or set context.kind = "ulysses"'
        )
    if mask is None or context == 1 or run_file.context.kind == "ulysses" or run_file.batch.sequence % (2 * context):
        return None
    chunk = run_file.batch.sequence // (2 * context)
    if chunk % mask.block == 0:
        return None
    return (
        f"model.attention.block = {mask.block} does not divide the two chunks of {chunk} tokens of batch.sequence = "
        f"{run_file.batch.sequence} that a rank of layout.context = {context} holds: set it to "
        f'{math.gcd(mask.block, chunk)}, or context.kind = "ulysses"'
    )


def _feed_forward(run_file: RunFile) -> str | None:
    """On a grid its panels have to come out, which is less: see `grid_refusal`."""
    layout, model = run_file.layout, run_file.model
    if not isinstance(model, GPTConfig) or layout.tensor_grid is not None:
        return None
    return divides("layout.tensor", layout.tensor, "model.feed_forward_width", model.hidden_width)


def _experts(run_file: RunFile) -> str | None:
    model, layout = run_file.model, run_file.layout
    if not isinstance(model, MoEConfig):
        if layout.expert == 1:
            return None
        if isinstance(model, TransformersConfig):
            stated = experts_of(model)
            return stated and divides("layout.expert", layout.expert, f"model.config.{stated[0]}", stated[1])
        if isinstance(model, ForeignModel):
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


def _fetched(run_file: RunFile) -> bool:
    """ZeRO-3: blocks have their weights while they compute, and only then."""
    return run_file.layout.shard > 1 and run_file.memory.zero in (None, 3)


_FETCHED = Fact("layout.shard and memory.zero = 3", _fetched)
_UNGRAPHED = '"max-autotune-no-cudagraphs"'

# `torch.compile` cannot trace through collectives, nor a model whose parts are called one by one.
_COMPILED = against(
    facts.COMPILED,
    *axes("tensor context expert pipeline", "a split model cannot be compiled", "leave run.compile out"),
    Rule(
        _FETCHED.where(facts.COMPILED_WHOLE, f'{_FETCHED.name} (not run.compile = "blocks")'),
        "blocks fetch their weights while the model computes, which one program of all of it cannot",
        'set run.compile = "blocks", or memory.zero to 1 or 2',
    ),
)


def _adds_up(run_file: RunFile) -> str | None:
    samples = default_micro_samples(run_file)
    several = samples is not None and samples < most_samples(run_file, shares=run_file.stated_processes or 1)
    return f"microbatches of {samples} samples" if several else None


# What a CUDA graph has written, its next replay overwrites, and it reads weights where they were recorded.
_GRAPHED = against(
    facts.equal("run.compile_mode", "reduce-overhead", "max-autotune").where(facts.COMPILED),
    Rule(
        _FETCHED,
        "each forward gathers weights into other memory, where a CUDA graph does not look",
        f"set the mode to {_UNGRAPHED}, or memory.zero to 1 or 2",
    ),
    Rule(
        Fact("several microbatches", _adds_up),
        "a step of several would add to gradients that a CUDA graph overwrites",
        f"leave batch.micro_samples out, or set the mode to {_UNGRAPHED}",
    ),
)


def _zero(run_file: RunFile) -> str | None:
    """Among copies nothing is split; a run of one copy on one rank may say what more of them would do."""
    layout, zero = run_file.layout, run_file.memory.zero
    processes = run_file.stated_processes or 1
    if zero is None or layout.auto or layout.shard > 1 or processes == layout.replica_size:
        return None
    return (
        f"memory.zero = {zero} splits the model's state over layout.shard, which is 1: set layout.shard to the "
        "number of ranks that share one copy (layout.replicate to the number of copies), or leave memory.zero out"
    )


# How many microbatches a rank of a split replica has in a step, and of how many samples: all ranks have as many.
#
# Reads the run file alone, so that rules, schedules to be looked at and the run itself have one answer.


@dataclass(frozen=True)
class MicrobatchSizes:
    """`rounds` times a step, `in_flight` microbatches of `samples` samples go through a pipeline together."""

    samples: int
    in_flight: int
    rounds: int


def microbatch_sizes(run_file: RunFile, *, shares: int) -> MicrobatchSizes:
    """What the run file asks for where the samples of a step are split over `shares` (replicate x shard).

    Asynchronous pipelines drain only between steps, so that there is one round of all the microbatches that come out.
    """
    layout, pipeline, group = run_file.layout, run_file.pipeline, statistics_group(run_file.model)
    in_flight = (pipeline.microbatches or 2 * layout.pipeline) if layout.pipeline > 1 else 1
    most = most_samples(run_file, shares=shares)
    samples = default_micro_samples(run_file) or group * -(-most // (group * in_flight))
    if pipeline.asynchronous:
        return MicrobatchSizes(samples, in_flight=-(-most // samples), rounds=1)
    return MicrobatchSizes(samples, in_flight=in_flight, rounds=-(-most // (samples * in_flight)))


def most_samples(run_file: RunFile, *, shares: int) -> int:
    """Samples of a step in the largest share, in whole groups of statistics."""
    group = statistics_group(run_file.model)
    return group * -(-(run_file.batch.global_samples // group) // shares)


def _other_number(run_file: RunFile) -> str | None:
    """Why the written number of updates is not that which a step would make; None where it is, or none is written.

    Microbatches are of one size, of `s` groups of samples: the numbers that come out are ceil(groups / s).
    """
    wanted = run_file.pipeline.microbatches
    shares = run_file.batch_shares
    sizes, most = microbatch_sizes(run_file, shares=shares), most_samples(run_file, shares=shares)
    if wanted is None or sizes.in_flight == wanted:
        return None
    smaller = sizes.samples - statistics_group(run_file.model)
    nearest = [sizes.in_flight] if smaller == 0 else [sizes.in_flight, -(-most // smaller)]
    return (
        f"{most} samples in microbatches of {sizes.samples} make {sizes.in_flight} updates a step; "
        f"nearest: {' or '.join(map(str, nearest))}"
    )


def _stated_twice(run_file: RunFile) -> bool:
    return run_file.pipeline.microbatches is not None and run_file.batch.micro_samples is not None


# PipeDream updates after each microbatch. Refused is what needs one version of the weights, or a moment when all stages
# hold the gradient of one microbatch.
pipedream_refusal = against(
    facts.PIPEDREAM,
    Rule(
        facts.equal("layout.pipeline", 1),
        "it is another computation than training without a pipeline",
        "set it to 2 or more",
    ),
    *axes("shard", "each stage keeps older weights, whole", "use layout.replicate"),
    *axes("expert", "its older weights are proved with whole experts only", "set it to 1"),
    Rule(facts.MOE, "experts are balanced once a step", "choose another schedule"),
    Rule(
        Fact("model.tied = true", lambda run_file: getattr(run_file.model, "tied", False)),
        "the two ends of the pipeline are at different updates",
        "set it to false",
    ),
    Rule(facts.FLOAT16, "its loss scale needs a vote of all stages", "use bfloat16"),
    Rule(
        Fact("pipeline.microbatches and batch.micro_samples", _stated_twice),
        "each says how many updates a step makes",
        "leave one out",
    ),
    Rule(facts.stated("pipeline.microbatches").where(_other_number), lambda run_file: _other_number(run_file) or ""),
    Rule(facts.named("optimizer.lr_for_samples"), "an update is a microbatch there", "set optimizer.lr alone"),
)

# The planner picks among plans that have a price.
_PLANNED = against(
    facts.equal("layout.auto", True),
    Rule(facts.named("layout.tensor_grid"), "a grid has no price", "leave one of the two out"),
    Rule(facts.PIPEDREAM, "it has no price, because it updates within a step", "leave one of the two out"),
)

layout_refusal = in_order(
    _PLANNED,
    _only_chains,
    _heads,
    _sparse_attention,
    _feed_forward,
    _experts,
    _sequence,
    grid_refusal,
    _ulysses,
    _schedule,
    _stages,
    _COMPILED,
    _GRAPHED,
    _zero,
)
"""Whether this layout goes with the model and the batch."""
