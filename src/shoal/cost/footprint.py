"""Bytes that one rank needs at its peak, by what needs them, for any pipeline rank.

    weights, gradients, optimizer   parameters of the stage x StateBytes, divided by ZeRO (cost.state_bytes)
    activations                     kept bytes of a layer x layers x microbatches in flight
    recomputed                      one layer without recomputation, while its backward runs
    logits                          float32 logits and their gradient, on the last stage
    gathered                        ZeRO-3: the layer in use and the one that is fetched ahead, weights and gradients
    buckets                         reduction buckets where gradients are summed outside of their own storage
    workspace                       what the device's libraries take: CUDA context, cuBLAS and NCCL buffers
    slack                           what the allocator holds beyond what it gave out

Experts divide by `expert` and use their own data axis, `expert_shard`. DualPipeV holds the parameters of two stages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shoal.cost.activations import Kept, layer_activation_bytes, logit_bytes
from shoal.cost.flops import Recompute
from shoal.cost.in_flight import in_flight
from shoal.cost.parameters import (
    dense_layer_parameters,
    embedding_parameters,
    expert_parameters,
    head_parameters,
)
from shoal.cost.plan import Plan
from shoal.cost.state_bytes import StateBytes
from shoal.cost.transformer import Transformer

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
    """Bytes of one rank, itemised."""

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

    @property
    def total(self) -> float:
        """All of it, bytes."""
        return sum(self.__dict__.values())

    def items(self) -> dict[str, float]:
        """Bytes by name, in the order of the declaration."""
        return dict(self.__dict__)


def footprint(
    model: Transformer,
    plan: Plan,
    *,
    rank: int,
    sequence: int,
    state: StateBytes,
    kept: Kept,
    overheads: Overheads,
) -> Footprint:
    """The peak of pipeline rank `rank`, counted from 0, the first stage."""
    dense, experts = stage_parameters(model, plan, rank)
    own = _state(plan, state, dense=dense, experts=experts)
    activations, recomputed, logits = _activations(model, plan, rank, sequence, kept)
    gathered = _gathered(model, plan, state)
    buckets = 2 * overheads.bucket_bytes if plan.data_parallel * plan.layout.context > 1 else 0.0
    given = sum(own) + activations + recomputed + logits + gathered + buckets
    return Footprint(
        weights=own[0],
        gradients=own[1],
        optimizer=own[2],
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
    layers = plan.stage_layers(model.layers) * (2 if twice else 1)
    dense, experts = _parameters(model, layers, rank == 0, rank == pipeline - 1)
    return dense / tensor, experts / plan.layout.expert


@functools.lru_cache(maxsize=1 << 12)
def _parameters(model: Transformer, layers: float, first: bool, last: bool) -> tuple[float, float]:
    """(dense, expert) parameters of `layers` layers, with the embedding of the first and the head of the last stage."""
    whole = layers * dense_layer_parameters(model)
    whole += embedding_parameters(model) if first or (last and model.tied) else 0
    whole += head_parameters(model) if last else 0
    return whole, layers * model.experts * expert_parameters(model)


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
    kept_bytes = sizes[plan.recompute] * plan.stage_layers(model.layers) * held
    again = sizes["none"] - sizes[plan.recompute] if plan.recompute != "none" else 0.0
    last = rank == layout.pipeline - 1
    logits = logit_bytes(model, tokens, tensor=layout.tensor, element_bytes=kept.element_bytes) if last else 0.0
    return kept_bytes, max(0.0, again), 2 * logits


def _gathered(model: Transformer, plan: Plan, state: StateBytes) -> float:
    if plan.zero < 3 or plan.state_ranks == 1:
        return 0.0
    experts = model.experts * expert_parameters(model) / plan.layout.expert
    layer = dense_layer_parameters(model) / plan.layout.tensor + experts
    return layer * (FOLLOWING_UNITS * state.activation + state.gradient)
