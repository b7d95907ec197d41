"""Bytes of tensors that a rank of this project holds at the peak of a step: closed forms for its own eager blocks.

Per token of a dense block with width w, query and key widths q and k, inner width f, on t tensor ranks, the numbers
that the backward needs (the tensors that PyTorch's operators save):

    two norms       input and normalised input, 4 w, in float32 at least, split by sequence parallelism; their outputs
                    2 w, never split
    attention       query, key, value, result: (2 q + 2 k) / t, and a float32 log-sum-exp of each head
    feed-forward    gate, its activation, up, product: 4 f / t; plain GELU 2 f / t

Recomputed by operator, a block keeps its input w, attention's result q / t with its log-sum-exp, and every second
product: key k / t, attention's output w, and f / t of a gated feed-forward or w of a plain one.

A peak is one of two moments, whichever is larger:

  the loss's backward     all kept, the head's norm 3 w and log-probabilities V / t; on top two tensors of logits, or
                          four of the stream in the backward of the last norm
  a block's backward      all kept, but the head's; a block computed again; on top w + 2 f / t: gradients on their way

Where a schedule runs, the output of each microbatch in flight stays besides, and gradients lie beside their buckets
until its end. ZeRO-2 holds whole buckets of an earlier microbatch; ZeRO-3 what belongs to no block, and two blocks.
ZeRO divides over `shard` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.activations import Kept, in_flight
from shoal.cost.footprint import Footprint, Overheads, StateBytes, stage_parameters
from shoal.cost.plan import Plan
from shoal.cost.transformer import (
    Transformer,
    dense_layer_parameters,
    embedding_parameters,
    head_parameters,
)

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
