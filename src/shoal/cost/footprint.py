"""Bytes that one rank needs at its peak, by what needs them, for any pipeline rank.

    weights, gradients, optimizer   parameters of the stage x StateBytes, divided by ZeRO
    activations                     kept bytes of a layer x layers x microbatches in flight
    recomputed                      one layer without recomputation, while its backward runs
    logits                          float32 logits and their gradient, on the last stage; by chunks, of one of them
    gathered                        ZeRO-3: weights of the layer in use and of the one that is fetched ahead, and a
                                    gradient; or the head's weight and gradient, where it is larger
    buckets                         reduction buckets where gradients are summed outside of their own storage
    workspace                       what the device's libraries take: CUDA context, cuBLAS and NCCL buffers
    slack                           what the allocator holds beyond what it gave out

Of a parameter, mixed-precision Adam keeps 18 bytes: weight 2, gradient 4, float32 master 4, two moments 8
(Megatron-LM). ZeRO divides over D ranks (Rajbhandari et al. arXiv:1910.02054); with weight w, gradient r, optimizer o:
ZeRO-1 w + r + o/D, ZeRO-2 w + (r + o)/D, ZeRO-3 (w + r + o)/D. What an optimizer keeps is what its slots declare;
those whose momentum travels in one bit keep four more vectors beside, which are not counted.

Experts divide by `expert` and use their own data axis, `expert_shard`. DualPipeV holds the parameters of two stages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shoal.cost.activations import Kept, in_flight, layer_activation_bytes, loss_bytes
from shoal.cost.plan import Plan, Zero
from shoal.cost.transformer import (
    Recompute,
    Transformer,
    dense_layer_parameters,
    embedding_parameters,
    expert_layer_parameters,
    expert_parameters,
    head_parameters,
)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter has in each kind of state; `wire` is the dtype in which gradients are summed over ranks.

    `stream` are those of the residual stream, which autocast leaves in the parameters' dtype; `saved` those of what the
    optimizer keeps, in a checkpoint, where they are others; `written` those of all of it on the disk, where they are
    fewer. `streamed_bytes`: so much of the optimizer's at most is on the device, in all, because the rest lives
    elsewhere; None: all of it. `masters`: a float32 copy of the weights is among the optimizer's, which under ZeRO-3 is
    all that is kept of them.
    """

    weight: float
    gradient: float
    optimizer: float
    activation: float
    wire: float
    stream: float = 2
    saved: float | None = None
    written: float | None = None
    streamed_bytes: float | None = None
    masters: bool = False

    def sharded(self, zero: Zero, ranks: int) -> tuple[float, float, float]:
        """(weight, gradient, optimizer) bytes of one parameter on one of `ranks` ranks."""
        in_pieces = zero >= 3 and ranks > 1
        return (
            0.0 if in_pieces and self.masters else self.weight / (ranks if zero >= 3 else 1),
            self.gradient / (ranks if zero >= 2 else 1),
            self.optimizer / (ranks if zero >= 1 else 1),
        )

    @property
    def in_checkpoint(self) -> float:
        """Bytes of a parameter and what the optimizer keeps of it, as a checkpoint takes them."""
        return self.weight + (self.optimizer if self.saved is None else self.saved)

    def on_device(self, optimizer_bytes: float) -> float:
        """What of a rank's optimizer state its device holds at its peak."""
        return optimizer_bytes if self.streamed_bytes is None else min(optimizer_bytes, self.streamed_bytes)


MEGATRON_FP16 = StateBytes(weight=2, gradient=4, optimizer=12, activation=2, wire=2)
"""Half-precision weights, float32 gradient sums, master weights and Adam's moments; gradients travel in half."""

MEGATRON_BF16 = StateBytes(weight=2, gradient=4, optimizer=12, activation=2, wire=4)
"""The same with gradients that travel in float32."""

AUTOCAST = StateBytes(weight=4, gradient=4, optimizer=8, activation=2, wire=4, stream=4)
"""Float32 weights, gradients and Adam's moments, matrix products in bfloat16 or float16: `precision.kind =
"bfloat16"`."""

MASTERS = StateBytes(weight=2, gradient=4, optimizer=12, activation=2, wire=4, masters=True)
"""Weights and activations in bfloat16, float32 gradients, and in the optimizer masters and Adam's moments:
`precision.kind = "bfloat16_params"`."""

FLOAT32 = StateBytes(weight=4, gradient=4, optimizer=8, activation=4, wire=4, stream=4)
FLOAT64 = StateBytes(weight=8, gradient=8, optimizer=16, activation=8, wire=8, stream=8)


FOLLOWING_UNITS = 2
"""Layers whose weights are whole at once under ZeRO-3: the one in use and the one that is fetched ahead (FSDP2)."""


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What is not the model's: bytes of the libraries, bytes of a bucket, share that the allocator holds in excess."""

    workspace_bytes: float = 1.5 * 2**30
    bucket_bytes: float = 25 * 2**20
    slack_share: float = 0.04


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank, itemised; `residuals` are what codecs with error feedback keep of gradients."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    recomputed: float
    logits: float
    gathered: float
    buckets: float
    workspace: float
    slack: float
    residuals: float = 0.0

    @property
    def total(self) -> float:
        """All of it, bytes."""
        return sum(self.__dict__.values())

    def items(self) -> dict[str, float]:
        """Bytes by name, in the order of the declaration."""
        return dict(self.__dict__)


def footprint(
    model: Transformer, plan: Plan, *, rank: int, sequence: int, state: StateBytes, kept: Kept, overheads: Overheads
) -> Footprint:
    """The peak of pipeline rank `rank`, counted from 0, the first stage."""
    dense, experts = stage_parameters(model, plan, rank)
    own = _state(plan, state, dense=dense, experts=experts)
    activations, recomputed, logits = _activations(model, plan, rank, sequence, kept)
    gathered = _gathered(model, plan, state)
    buckets = 2 * overheads.bucket_bytes if plan.data_parallel * plan.layout.context > 1 else 0.0
    given = own[0] + own[1] + state.on_device(own[2]) + activations + recomputed + logits + gathered + buckets
    return Footprint(
        weights=own[0],
        gradients=own[1],
        optimizer=state.on_device(own[2]),
        activations=activations,
        recomputed=recomputed,
        logits=logits,
        gathered=gathered,
        buckets=buckets,
        workspace=overheads.workspace_bytes,
        slack=overheads.slack_share * given,
    )


def stage_parameters(model: Transformer, plan: Plan, rank: int) -> tuple[float, float]:
    """(dense, expert) parameters of one rank of a pipeline stage before ZeRO; its tensor and expert share only."""
    pipeline, tensor = plan.layout.pipeline, plan.layout.tensor
    twice = plan.schedule == "DualPipeV" and pipeline > 1
    layers = plan.rank_layers(model.layers, rank) * (2 if twice else 1)
    dense, experts = _parameters(model, layers, rank == 0, rank == pipeline - 1)
    return dense / tensor, experts / plan.layout.expert


@functools.lru_cache(maxsize=1 << 12)
def _parameters(model: Transformer, layers: float, first: bool, last: bool) -> tuple[float, float]:
    """(dense, expert) parameters of `layers` layers, with the embedding of the first and the head of the last stage."""
    whole = layers * dense_layer_parameters(model)
    whole += embedding_parameters(model) if first or (last and model.tied) else 0
    whole += head_parameters(model) if last else 0
    return whole, layers * expert_layer_parameters(model)


def _state(plan: Plan, state: StateBytes, *, dense: float, experts: float) -> tuple[float, float, float]:
    layout = plan.layout
    common = state.sharded(plan.zero, plan.state_ranks)
    if not experts:
        return dense * common[0], dense * common[1], dense * common[2]
    own = state.sharded(plan.zero, max(1, plan.state_ranks * layout.tensor // layout.expert))
    first, second, third = (dense * c + experts * e for c, e in zip(common, own, strict=True))
    return first, second, third


def _activations(model: Transformer, plan: Plan, rank: int, sequence: int, kept: Kept) -> tuple[float, float, float]:
    """(held, recomputed at once, logits) bytes."""
    layout = plan.layout
    tokens = plan.microbatch * sequence / layout.context
    kinds: tuple[Recompute, ...] = (plan.recompute, "none")
    sizes = {
        recompute: layer_activation_bytes(
            model,
            tokens,
            sequence,
            tensor=layout.tensor,
            sequence_parallel=plan.sequence_parallel,
            recompute=recompute,
            kept=kept,
            expert=layout.expert,
        )
        for recompute in kinds
    }
    held = in_flight(
        plan.schedule,
        rank,
        pipeline=layout.pipeline,
        virtual_stages=plan.virtual_stages,
        microbatches=plan.microbatches,
    )
    share = plan.recompute_share if plan.recompute != "none" else 1.0
    layer_bytes = share * sizes[plan.recompute] + (1 - share) * sizes["none"]
    kept_bytes = layer_bytes * plan.rank_layers(model.layers, rank) * held
    again = sizes["none"] - sizes[plan.recompute] if plan.recompute != "none" else 0.0
    last = rank == layout.pipeline - 1
    chunks = plan.loss_chunks
    logits = loss_bytes(model, tokens, tensor=layout.tensor, kept=kept, chunks=chunks) if last else 0.0
    return kept_bytes, max(0.0, again), logits


def _gathered(model: Transformer, plan: Plan, state: StateBytes) -> float:
    if plan.zero < 3 or plan.state_ranks == 1:
        return 0.0
    experts = model.experts * expert_parameters(model) / plan.layout.expert
    layer = dense_layer_parameters(model) / plan.layout.tensor + experts
    head = model.vocabulary * model.hidden / plan.layout.tensor
    own = layer * (FOLLOWING_UNITS * state.activation + state.wire)
    return max(own, head * (state.activation + state.wire) + layer * state.activation)


# Bytes of tensors that a rank of this project holds at the peak of a step: closed forms for its own eager blocks.
#
# Per token of a dense block with width w, query and key widths q and k, inner width f, on t tensor ranks, the numbers
# that the backward needs (the tensors that PyTorch's operators save):
#
#     two norms       input and normalised input, 4 w, in float32 at least, split by sequence parallelism; their outputs
#                     2 w, never split
#     attention       query, key, value, result: (2 q + 2 k) / t, and a float32 log-sum-exp of each head
#     feed-forward    gate, its activation, up, product: 4 f / t; plain GELU 2 f / t
#
# Recomputed by operator, a block keeps its input w, attention's result q / t with its log-sum-exp, and every second
# product: key k / t, attention's output w, and f / t of a gated feed-forward or w of a plain one.
#
# A peak is one of two moments, whichever is larger:
#
#   the loss's backward     all kept, the head's norm 3 w and log-probabilities V / t; on top two tensors of logits, or
#                           four of the stream in the backward of the last norm
#   a block's backward      all kept, but the head's; a block computed again; on top w + 2 f / t: gradients on their way
#
# Where a schedule runs, the output of each microbatch in flight stays besides, and gradients lie beside their buckets
# until its end. ZeRO-2 holds whole buckets of an earlier microbatch; ZeRO-3 what belongs to no block, and two blocks.
# ZeRO divides over `shard` alone.


FLOAT_BYTES = 4
BUCKETS_ON_THE_WAY = 3
"""Of ZeRO-2: two that travel and one that is filled."""
FORWARDS_FIRST = ("GPipe", "LoopedBFS")
MOVING = 3
"""Activations that a stage sends, and receives ahead of their use."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What the forms below have in common: tokens of a microbatch on this rank, and how it is split."""

    model: Transformer
    plan: Plan
    kept: Kept
    tokens: float

    @property
    def tensor(self) -> int:
        return self.plan.layout.tensor

    @property
    def slices(self) -> int:
        """Into how many parts the residual stream is split."""
        return self.tensor if self.plan.sequence_parallel else 1

    @property
    def stream(self) -> float:
        """One tensor of the residual stream."""
        return self.tokens * self.model.hidden * self.kept.stream_bytes / self.slices

    @property
    def normed(self) -> float:
        """What a norm keeps of the residual stream, its input or that normalised: in float32 at least."""
        return self.stream * max(self.kept.stream_bytes, FLOAT_BYTES) / self.kept.stream_bytes

    def block(self) -> float:
        """What a block keeps without recomputation."""
        model, size = self.model, self.kept.element_bytes
        outputs = 2 * self.tokens * model.hidden * size
        attention = 2 * model.attention_width + 2 * model.kv_width
        inner = (4 if model.gated else 2) * model.feed_forward
        heads = FLOAT_BYTES * model.heads / self.tensor
        scales = 2 * FLOAT_BYTES / self.slices
        masks = 2 * self.stream if self.kept.dropout else 0.0
        return (
            4 * self.normed
            + outputs
            + masks
            + self.tokens * (size * (attention + inner) / self.tensor + heads + scales)
        )

    def held_block(self) -> float:
        """What a block keeps under the plan's recomputation."""
        model, size = self.model, self.kept.element_bytes
        if self.plan.recompute == "full":
            return self.stream
        if self.plan.recompute != "operators":
            return self.block()
        split = model.attention_width + model.kv_width + (model.feed_forward if model.gated else 0)
        whole = model.hidden * (1 if model.gated else 2)
        heads = FLOAT_BYTES * model.heads / self.tensor
        return self.stream + self.tokens * (size * (split / self.tensor + whole) + heads)

    def on_the_way(self) -> float:
        """Gradients between the operators of a block's backward; those of split layers are summed in a copy."""
        copies = 3 if self.tensor > 1 else 1
        return copies * self.stream + 2 * self.tokens * self.model.feed_forward * self.kept.element_bytes / self.tensor

    def head_norm(self) -> float:
        """The last norm's input and normalised input, and its output, which the head's product needs."""
        return 2 * self.normed + self.tokens * (self.model.hidden * self.kept.element_bytes + FLOAT_BYTES / self.slices)

    def logits(self) -> float:
        """One float32 tensor of logits, of a chunk of the tokens."""
        return self.tokens / self.plan.loss_chunks * FLOAT_BYTES * self.model.vocabulary / self.tensor

    def chunked_loss(self) -> float:
        """At once while a loss in chunks is computed: logits of a chunk and what comes of them, the gradient of the
        head's input, and of its weight the sum so far and one chunk's term.

        On one rank of pipeline and tensor gradients are computed with the losses, in the memory of the logits: those of
        one chunk and of the next are there, and in float32 a term is added in place.
        """
        model, each = self.model, self.kept.element_bytes
        inputs, weight = self.tokens * model.hidden * each, model.vocabulary * model.hidden / self.tensor
        if self.tensor > 1 or self.plan.layout.pipeline > 1:
            return 3 * self.logits() + inputs + 2 * FLOAT_BYTES * weight
        return 2 * self.logits() + inputs + (FLOAT_BYTES + (each if each < FLOAT_BYTES else 0)) * weight


def eager_footprint(
    model: Transformer, plan: Plan, *, rank: int, sequence: int, state: StateBytes, kept: Kept, overheads: Overheads
) -> Footprint:
    """The peak of pipeline rank `rank` of a dense model. `bucket_bytes` are those of one gradient bucket."""
    step = _Step(model=model, plan=plan, kept=kept, tokens=plan.microbatch * sequence / plan.layout.context)
    numbers = sum(stage_parameters(model, plan, rank))
    weights, gradients, optimizer = (numbers * size for size in state.sharded(plan.zero, plan.layout.shard))
    activations, recomputed, logits = _eager_activations(step, rank)
    given = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": state.on_device(optimizer),
        "activations": activations,
        "recomputed": recomputed,
        "logits": logits,
        "gathered": _eager_gathered(step, state),
        "buckets": _beside_buckets(plan, numbers * state.gradient, overheads.bucket_bytes, activations),
    }
    return Footprint(**given, workspace=overheads.workspace_bytes, slack=overheads.slack_share * sum(given.values()))


def eager_block_bytes(model: Transformer, plan: Plan, *, sequence: int, kept: Kept) -> float:
    """What one block keeps of one microbatch under the plan's recomputation."""
    step = _Step(model=model, plan=plan, kept=kept, tokens=plan.microbatch * sequence / plan.layout.context)
    return step.held_block()


def _eager_activations(step: _Step, rank: int) -> tuple[float, float, float]:
    """(kept of all that is in flight, computed again and on the way, the head's and the loss's) bytes."""
    plan, pipeline = step.plan, step.plan.layout.pipeline
    held = in_flight(
        plan.schedule, rank, pipeline=pipeline, virtual_stages=plan.virtual_stages, microbatches=plan.microbatches
    )
    whole = step.block()
    block = plan.recompute_share * step.held_block() + (1 - plan.recompute_share) * whole
    kept = held * plan.rank_layers(step.model.layers, rank) * block
    again = whole - step.held_block() + step.on_the_way()
    if pipeline > 1:
        kept += (held * plan.virtual_stages + MOVING) * step.stream
    if rank < pipeline - 1:
        return kept, again, 0.0
    waiting = held if plan.schedule in FORWARDS_FIRST else 1.0
    chunked = plan.loss_chunks > 1
    heads = (waiting - 1) * (step.head_norm() + (0.0 if chunked else step.logits()))
    at_once = step.chunked_loss() if chunked else 3 * step.logits()
    loss = step.head_norm() + max(at_once, 4 * step.stream)
    return (kept + heads, 0.0, loss) if loss > again else (kept + heads, again, 0.0)


def _eager_gathered(step: _Step, state: StateBytes) -> float:
    """ZeRO-3: what belongs to no block, the block in use, the one that is fetched ahead. A schedule lets all stay."""
    plan, model = step.plan, step.model
    if plan.zero < 3 or plan.layout.shard == 1:
        return 0.0
    blocks = plan.stage_layers(model.layers) if plan.layout.pipeline > 1 else 2.0
    rest = embedding_parameters(model) + head_parameters(model)
    return state.weight * (rest + blocks * dense_layer_parameters(model)) / plan.layout.tensor


def _beside_buckets(plan: Plan, gradient_bytes: float, bucket_bytes: float, activations: float) -> float:
    """Whole gradients beside those that the state counts; where all forwards come first, there are none before one
    microbatch is done with."""
    if plan.layout.pipeline > 1:
        done = activations / plan.microbatches if plan.schedule in FORWARDS_FIRST else 0.0
        return max(0.0, gradient_bytes - done)
    if plan.zero < 2 or plan.layout.shard == 1 or plan.microbatches == 1:
        return 0.0
    return min(gradient_bytes, BUCKETS_ON_THE_WAY * bucket_bytes)
