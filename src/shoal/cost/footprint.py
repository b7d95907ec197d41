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
