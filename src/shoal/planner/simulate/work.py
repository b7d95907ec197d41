"""What a simulated step is made of, as plain numbers: seconds of every stage and action, and the cost of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.codec.config import CodecConfig
from shoal.codec.costs import Matrices
from shoal.cost.footprint import stage_parameters
from shoal.cost.plan import Plan
from shoal.cost.transformer import (
    dense_layer_parameters,
    embedding_parameters,
    expert_layer_parameters,
    head_parameters,
    matrix_shapes,
)
from shoal.planner.predict.coding import gradient_sum
from shoal.planner.predict.machine import ends_group, shard_group, stage_group
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.step import boundary_wire_bytes, coding_s, gathers, optimizer_s, sums_overlap
from shoal.planner.predict.workload import COMPUTED, balanced_layers
from shoal.schedules.table import Action, ScheduleTable

# How long devices take compared with what they should: stragglers as distributions, deterministic by seed.
#
# A device is slow for the whole run with probability `slow_share`, then everything takes `slow_factor` times as long;
# beside that every action of every device takes exp(sigma Z) times as long, Z standard normal (lognormal noise with
# median 1). Peers that wait for each other in every layer (tensor and context ranks) move as the slowest of them: their
# factors fold into one by a maximum, exactly.


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """A distribution of factors; all defaults: every device takes what it should. `slow` names devices of which it is
    known, as {(replica, pipeline rank, peer): factor}."""

    slow_share: float = 0.0
    slow_factor: float = 1.0
    sigma: float = 0.0
    seed: int = 0
    slow: Mapping[tuple[int, int, int], float] = field(default_factory=dict)

    @property
    def even(self) -> bool:
        """Whether all devices always do the same, so that replicas can be folded."""
        return not self.sigma and not self.slow and (not self.slow_share or self.slow_factor == 1)

    def paces(self, rank: int, *, replicas: int, peers: int, actions: int) -> np.ndarray:
        """How many times as long as they should the actions of a pipeline rank's devices take: [replica, peer, action].

        A device's numbers depend on how many there are, not on which of them are simulated.
        """
        draw = np.random.default_rng((self.seed, rank))
        slow = np.where(draw.random((replicas, peers)) < self.slow_share, self.slow_factor, 1.0)
        for (replica, own_rank, peer), factor in self.slow.items():
            if own_rank == rank:
                slow[replica, peer] *= factor
        noise = np.exp(self.sigma * draw.standard_normal((replicas, peers, actions))) if self.sigma else 1.0
        return slow[:, :, None] * noise * np.ones(actions)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Seconds that a message occupies its ports, and seconds until it arrives after that."""

    busy_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's seconds for one microbatch, and the sums of its gradients: one message for each of its units.

    `inside_s` is the part of all three that is communication inside the stage which nothing hides.
    """

    forward_s: float
    input_s: float
    weight_s: float
    sums: tuple[Message, ...] = ()
    inside_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A step. `blocks_sender`, `blocks_receiver`: they do not compute during a transfer. `behind`: sums of gradients
    wait for the whole backward of their rank. `after`: collectives of every rank between its sums and its optimizer;
    `coding_s` are a rank's seconds of coding what it sends, all of them there too."""

    stages: tuple[Stage, ...]
    transfer: Message
    blocks_sender: bool = False
    blocks_receiver: bool = False
    behind: bool = False
    slowdown: float = 0.0
    after: Message = Message(busy_s=0.0)
    optimizer_s: float = 0.0
    coding_s: float = 0.0


def lasting_s(stage: Stage, action: Action) -> float:
    """Seconds of one action of a stage on a device that takes what it should."""
    return {
        "F": stage.forward_s,
        "I": stage.input_s,
        "W": stage.weight_s,
        "B": stage.input_s + stage.weight_s,
    }[action.kind]


def uniform(stages: int, *, forward_s: float, input_s: float, weight_s: float, transfer_s: float = 0.0) -> StepWork:
    """Equal stages and nothing else: what closed forms and papers speak of. Transfers occupy nothing."""
    stage = Stage(forward_s=forward_s, input_s=input_s, weight_s=weight_s)
    return StepWork(stages=(stage,) * stages, transfer=Message(busy_s=0.0, latency_s=transfer_s))


HEAD_FORWARD, HEAD_INPUT = 1 / 3, 1 / 3
"""Head and loss are matrix products: as long forward as for the input's and for the weights' gradient."""


# A plan's `StepWork` in the seconds of `planner.predict.Predictor`: prediction and simulation share every constant.
#
# A stage's seconds are its layers', with the collectives inside them (tensor, context, expert, ZeRO's gathers); head
# and loss lie on the last stage. Transfers, sums of gradients, gathered weights and the optimizer are those of the
# bill.


def work_of(plan: Plan, predictor: Predictor) -> StepWork:
    """The step of `plan`, in the predictor's seconds. Raises `LayoutError` for more stages than layers."""
    stack = predictor.stack
    layers, fullest = stage_layers(plan, predictor), predictor.stage(plan)
    ends = range(len(layers))
    backward_s, codec = predictor.backward_s(plan), predictor.gradient_sum(plan).codec
    return StepWork(
        stages=tuple(
            _stage(plan, predictor, count, codec=codec, first=stage == ends[0], last=stage == ends[-1])
            for stage, count in enumerate(layers)
        ),
        transfer=_transfer(plan, predictor),
        blocks_sender=not stack.overlap_pipeline,
        behind=not sums_overlap(plan, predictor.machine),
        slowdown=predictor.constants.overlap_slowdown,
        after=Message(busy_s=_after_s(plan, predictor)),
        optimizer_s=optimizer_s(plan, fullest, predictor.machine),
        coding_s=coding_s(plan, fullest, predictor.machine, beside_s=backward_s),
    )


def stage_layers(plan: Plan, predictor: Predictor) -> tuple[int, ...]:
    """Layers of each stage, balanced. Raises `LayoutError` for more stages than parts."""
    return balanced_layers(predictor.workload.model, plan.layout.pipeline * plan.virtual_stages)


def _stage(plan: Plan, predictor: Predictor, layers: int, *, codec: CodecConfig, first: bool, last: bool) -> Stage:
    layer = predictor.layer(plan)
    head = sum(layer.head.values()) if last else 0.0
    gather_forward, gather_back = _gathered(plan, predictor, layers)
    wires = layers * sum(layer.items[name] for name in ("tensor", "context", "expert"))
    return Stage(
        forward_s=layers * layer.forward_s + HEAD_FORWARD * head + gather_forward,
        input_s=layers * layer.input_s + HEAD_INPUT * head + gather_back,
        weight_s=layers * layer.weight_s + (1 - HEAD_FORWARD - HEAD_INPUT) * head,
        sums=_sums(plan, predictor, layers, codec, first=first, last=last),
        inside_s=wires + gather_forward + gather_back + (layer.head["tensor"] if last else 0.0),
    )


def _gathered(plan: Plan, predictor: Predictor, layers: int) -> tuple[float, float]:
    """(forward, backward) seconds of ZeRO's collectives that this stage's computation does not hide."""
    layer, whole = predictor.layer(plan), plan.stage_layers(predictor.workload.model.layers)
    computed = whole * sum(layer.items.get(name, 0.0) for name in (*COMPUTED, "launches"))
    cost = gathers(plan, predictor.stage(plan), predictor.machine, beside_s=computed)
    seconds = cost.total_s * layers / whole
    forward = 1 / 3 if plan.zero == 3 else 0.0
    return seconds * forward, seconds * (1 - forward)


def _sums(
    plan: Plan, predictor: Predictor, layers: int, codec: CodecConfig, *, first: bool, last: bool
) -> tuple[Message, ...]:
    """One message a layer, the last layer's first, then what the first or last stage has beside its layers."""
    model, layout = predictor.workload.model, plan.layout
    dense, experts = dense_layer_parameters(model) / layout.tensor, expert_layer_parameters(model)
    units = [dense + experts / layout.expert] * layers
    beside = (embedding_parameters(model) if first else 0) + (head_parameters(model) if last else 0)
    units += [beside / layout.tensor] if beside else []
    one = matrix_shapes(model, layers=1, embedding=False, head=False)
    shapes = [one] * layers + [matrix_shapes(model, layers=0, embedding=first, head=last)] * bool(beside)
    sums = [
        gradient_sum(
            plan, predictor.machine, codec, numbers=numbers, matrices=[Matrices(*shape) for shape in held]
        ).wire_s
        for numbers, held in zip(units, shapes, strict=True)
    ]
    return tuple(Message(busy_s=seconds) for seconds in sums if seconds > 0)


def _after_s(plan: Plan, predictor: Predictor) -> float:
    """What no computation can hide: ZeRO's gather of new weights, the sum of a tied embedding's gradient."""
    model, layout, state = predictor.workload.model, plan.layout, predictor.stack.state
    seconds = 0.0
    if plan.zero in (1, 2):
        numbers = sum(stage_parameters(model, plan, 0))
        seconds += shard_group(plan, predictor.machine).all_gather(numbers * state.activation)
    if model.tied and layout.pipeline > 1:
        seconds += ends_group(plan, predictor.machine).all_reduce(
            embedding_parameters(model) / layout.tensor * state.wire
        )
    return seconds


def _transfer(plan: Plan, predictor: Predictor) -> Message:
    """One activation, or its gradient, from a stage to the next."""
    layout, stack = plan.layout, predictor.stack
    if layout.pipeline == 1:
        return Message(busy_s=0.0)
    size = boundary_wire_bytes(predictor.stage(plan), predictor.machine)
    hop = stage_group(plan, predictor.machine)
    split = plan.sequence_parallel or (stack.scatter_pipeline and hop.spans_nodes)
    share = size / (layout.tensor if split else 1)
    return Message(busy_s=share / hop.bytes_s, latency_s=hop.send(share) - share / hop.bytes_s)


# The most bytes of activations that each pipeline rank holds, counted along its row of the table.
#
# A forward stores M bytes for its stage and microbatch. A whole backward frees all of it; a split one keeps, from I to
# W, the part that only the weights' gradient needs: M_W of it, with M_W = 32sbh of M = sbh(34 + 5as/h) for a GPT of 16
# bits (arXiv:2401.10241, section 2.3): inputs of the matrix products and the gradients of their outputs.


def stored_bytes(
    table: ScheduleTable, *, stage_bytes: Sequence[float], weight_bytes: Sequence[float]
) -> tuple[float, ...]:
    """Peak of each rank. `stage_bytes` is what a stage keeps of one microbatch, `weight_bytes` its part until W."""
    peaks = []
    for row in table.rows:
        held = peak = 0.0
        for kind, stage, _ in row:
            whole, late = stage_bytes[stage], weight_bytes[stage]
            held += {"F": whole, "B": -whole, "I": late - whole, "W": -late}[kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


# Peak memory of each pipeline rank as its row of the table fills and empties it.
#
# Everything but the activations is the planner's own footprint; activations are counted along the row, so that a split
# backward, uneven stages and interleaving are what they are, and no closed form stands for them.


WEIGHT_NUMBERS = 16
"""Numbers of the hidden width that a token's weight gradients need in a layer: inputs of its products h + h + h + 4h
and gradients of their outputs 3h + h + 4h + h, 32sbh bytes of 16 bits (arXiv:2401.10241, section 2.3)."""


def rank_bytes(
    plan: Plan, predictor: Predictor, table: ScheduleTable, *, layers: Sequence[int] | None = None
) -> tuple[float, ...]:
    """Bytes of every pipeline rank at its peak; `layers` of each stage, the simulator's own cut unless given."""
    model, layout, stack = predictor.workload.model, plan.layout, predictor.stack
    tokens = plan.microbatch * predictor.workload.sequence / layout.context
    whole = predictor.block_bytes(plan)
    late = min(whole, WEIGHT_NUMBERS * stack.kept.element_bytes * tokens * model.hidden / layout.tensor)
    layers = layers or stage_layers(plan, predictor)
    stored = stored_bytes(table, stage_bytes=[n * whole for n in layers], weight_bytes=[n * late for n in layers])
    return tuple(_total(plan, predictor, rank, held) for rank, held in enumerate(stored))


def _total(plan: Plan, predictor: Predictor, rank: int, activations: float) -> float:
    """The footprint with these activations in the place of its own."""
    closed = predictor.footprint(plan, rank)
    return closed.total + (activations - closed.activations) * (1 + predictor.overheads.slack_share)
