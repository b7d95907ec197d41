"""Seconds of the operators of one transformer layer on one rank, as a training stack launches them.

Matrix products carry their shapes (`cost.matmul`); everything else is a pass over memory with the bytes it moves. What
is fused is what Megatron-LM fuses (bias and GELU; bias, dropout and residual; scale, mask and softmax). With n numbers
of the residual stream in a rank's microbatch, e bytes each:

    norm 2ne, backward 4ne              residual with dropout 3ne + mask            activation 2fe, backward 3fe
    a mixture sorts k copies of each token by expert and adds them up again: 2kne each, either way
    softmax 2qe, backward 3qe, dropout 2qe + mask      (q = b a s^2 / t scores; none of it with flash attention)
    copies of q, k, v and of the heads' output          sums of weight gradients where no product does them

Fused attention runs at the published rates of its kernel (`cost.matmul`). Under float8 the linear layers of blocks
compute in it; attention, router and head stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from shoal.cost.matmul import BACKWARD_FLOPS, Float8Casts, Matmul, Rates, float8_casts_s, float8_s, matmul_s, pass_s
from shoal.cost.transformer import Transformer, attention_parameters, attention_shapes, expert_parameters, layer_kinds

# What the host spends on a step beside its operators: the loop, hooks, modules.
#
#     seconds = step + microbatches x (microbatch + layers x layer)
#
# Three measured steps of tiny GPTs give the three, once what their operators take is subtracted.


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """Seconds of one rank on a core of its own."""

    step_s: float = 0.0
    microbatch_s: float = 0.0
    layer_s: float = 0.0

    def seconds(self, *, microbatches: int, layers: float) -> float:
        """Of one step in which a rank has `layers` layers."""
        return self.step_s + microbatches * (self.microbatch_s + layers * self.layer_s)


def host_overhead_of(
    measured_s: Mapping[tuple[int, int], float], operators_s: Callable[[int, int], float]
) -> HostOverhead:
    """From steps by (layers, microbatches): (1, 1), (l, 1) and (1, m); none is negative."""
    rest = {size: max(0.0, seconds - operators_s(*size)) for size, seconds in measured_s.items()}
    deep, many = max(size[0] for size in rest), max(size[1] for size in rest)
    layer_s = max(0.0, (rest[deep, 1] - rest[1, 1]) / (deep - 1))
    microbatch_s = max(0.0, (rest[1, many] - rest[1, 1]) / (many - 1) - layer_s)
    return HostOverhead(
        step_s=max(0.0, rest[1, 1] - microbatch_s - layer_s), microbatch_s=microbatch_s, layer_s=layer_s
    )


GATE_PASSES = MappingProxyType(
    {(False, False): (2, 3), (False, True): (2, 3), (True, False): (3, 5), (True, True): (5, 8)}
)
"""(gated, eager) -> numbers read and written for each number of the feed-forward's inner width: forward, backward."""

ROTARY_PASSES = 10
"""Numbers read and written for each number of queries and keys: two products, a turn, a sum, casts; counted, eager."""


Float8 = Literal["none", "dense", "all"]
"""Which linear layers of a block compute in float8: none, all but experts, or those too."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a layer: samples of a microbatch, all tokens of a sample, and how both are split.

    `eager`: gates and rotary positions are a kernel an operator, as PyTorch runs them uncompiled. `ring`: attention
    runs a block of keys at a time, one for each context rank.
    """

    samples: int
    sequence: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    element_bytes: float = 2.0
    stream_bytes: float = 2.0
    eager: bool = False
    dropout: bool = False
    flash_attention: bool = True
    fused_weight_gradient: bool = False
    fused_loss: bool = False
    whole_loss: bool = False
    ring: bool = False
    float8: Float8 = "none"
    float8_casts: Float8Casts = "torchao"

    @property
    def tokens(self) -> int:
        """Tokens of this rank, sequence parallelism aside."""
        return -(-self.samples * self.sequence // self.context)

    @property
    def routed_tokens(self) -> int:
        """Tokens that this rank routes to experts: tensor ranks divide those that they have in common."""
        return -(-self.tokens // self.tensor)


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Device seconds of one layer: forward and backward of products, of attention, of passes over memory.

    `last_product` is the forward of the product that ends the layer, a part of `matmul_forward`.
    """

    matmul_forward: float
    matmul_input: float
    matmul_weight: float
    attention_forward: float
    attention_backward: float
    passes_forward: float
    passes_backward: float
    last_product: float = 0.0

    @property
    def forward(self) -> float:
        """All of the forward."""
        return self.matmul_forward + self.attention_forward + self.passes_forward

    @property
    def backward(self) -> float:
        """All of the backward, nothing recomputed."""
        return self.matmul_input + self.matmul_weight + self.attention_backward + self.passes_backward


def layer_seconds(model: Transformer, share: Share, rates: Rates) -> LayerSeconds:
    """Roofline seconds of one layer on one rank, communication aside; of several kinds of layers, the mean."""
    kinds = [(part, _seconds_of(kind, share, rates)) for part, kind in layer_kinds(model)]
    if len(kinds) == 1:
        return kinds[0][1]
    names = [field.name for field in fields(LayerSeconds)]
    return LayerSeconds(**{name: sum(part * getattr(one, name) for part, one in kinds) for name in names})


def _seconds_of(model: Transformer, share: Share, rates: Rates) -> LayerSeconds:
    dense, experts = _products(model, share)
    router = [] if not model.experts else [Matmul(share.routed_tokens, model.experts, model.hidden)]
    size = share.element_bytes
    small = [*(dense if share.float8 != "none" else []), *(experts if share.float8 == "all" else [])]
    large = [*router, *(dense if share.float8 == "none" else []), *(experts if share.float8 != "all" else [])]
    casts = [float8_casts_s(p, rates, element_bytes=size, casts=share.float8_casts) for p in small]
    attention = _flash(model, share, rates) if share.flash_attention else _plain_attention(model, share, rates)
    passes = _passes(model, share, rates)
    last = (experts or dense)[-1]

    def seconds(way: Callable[[Matmul], Matmul]) -> float:
        whole = sum(matmul_s(way(p), rates, element_bytes=size) for p in large)
        return whole + sum(float8_s(way(p), rates) for p in small)

    return LayerSeconds(
        matmul_forward=seconds(lambda p: p),
        matmul_input=seconds(Matmul.input_gradient),
        matmul_weight=seconds(Matmul.weight_gradient),
        attention_forward=attention[0],
        attention_backward=attention[1],
        passes_forward=passes[0] + sum(one[0] for one in casts),
        passes_backward=passes[1] + sum(one[1] for one in casts),
        last_product=float8_s(last, rates) if last in small else matmul_s(last, rates, element_bytes=size),
    )


def head_seconds(model: Transformer, share: Share, rates: Rates) -> tuple[float, float, float]:
    """(products, loss, embedding) seconds of one microbatch, forward and backward, on the rank that has them.

    The loss makes about nine float32 passes over the logits (cast, maximum, subtraction, exponential, sum, target,
    division, gradient, cast) and two in the stack's dtype; a fused one makes three of the latter and no others. The
    embedding reads and writes four times.
    """
    tokens, columns = share.tokens, max(1, model.vocabulary // share.tensor)
    product = Matmul(tokens, columns, model.hidden)
    products = sum(
        matmul_s(p, rates, element_bytes=share.element_bytes)
        for p in (product, product.input_gradient(), product.weight_gradient())
    )
    passes = 3 * share.element_bytes if share.fused_loss else 9 * 4.0 + share.element_bytes
    loss = pass_s(tokens * (model.vocabulary if share.whole_loss else columns) * passes, rates)
    return products, loss, pass_s(4 * share.element_bytes * tokens * model.hidden, rates)


def _products(model: Transformer, share: Share) -> tuple[list[Matmul], list[Matmul]]:
    """Linear layers of one layer: (query-key-value, output, what every token goes through; this rank's experts)."""
    tokens, t = share.tokens, share.tensor
    dense = [Matmul(tokens, columns, inner) for columns, inner in attention_shapes(model, t)]
    if not model.experts:
        return dense + _feed_forward(model, tokens, max(1, model.feed_forward // t), 1), []
    if model.shared_feed_forward:
        dense += _feed_forward(model, tokens, max(1, model.shared_feed_forward // t), 1)
    routed = share.routed_tokens * model.experts_per_token * share.expert
    rows = max(1, int(model.fullest_rank(share.expert) * routed / model.experts))
    return dense, _feed_forward(model, rows, model.feed_forward, max(1, model.experts // share.expert))


def _feed_forward(model: Transformer, rows: int, inner: int, copies: int) -> list[Matmul]:
    up = Matmul(rows, (2 if model.gated else 1) * inner, model.hidden, copies)
    return [up, Matmul(rows, model.hidden, inner, copies)]


def _plain_attention(model: Transformer, share: Share, rates: Rates) -> tuple[float, float]:
    """Scores, softmax, dropout and weighted values, each through memory."""
    own = max(1, model.heads // share.tensor)
    queries = max(1, share.sequence // share.context)
    scores = Matmul(queries, share.sequence, model.head_size, share.samples * own)
    values = Matmul(queries, model.head_size, share.sequence, share.samples * own)
    size = share.element_bytes
    numbers = float(share.samples) * own * queries * share.sequence
    drop = pass_s((2 * size + 1) * numbers, rates) if share.dropout else 0.0
    forward = matmul_s(scores, rates, element_bytes=size) + matmul_s(values, rates, element_bytes=size)
    backward = sum(
        matmul_s(p, rates, element_bytes=size)
        for product in (scores, values)
        for p in (product.input_gradient(), product.weight_gradient())
    )
    return forward + pass_s(2 * size * numbers, rates) + drop, backward + pass_s(3 * size * numbers, rates) + drop


def _flash(model: Transformer, share: Share, rates: Rates) -> tuple[float, float]:
    """(forward, backward) seconds of fused attention; a ring's blocks are as long as a rank's part of the sequence."""
    own = max(1, model.heads // share.tensor)
    work = 4.0 * share.samples * share.sequence**2 / share.context * own * model.score_size / 2
    tokens = share.sequence / share.context if share.ring else share.sequence
    forward, backward = (
        flops / rates.attention_flops_s(head_size=model.score_size, tokens=tokens, backward=way)
        for way, flops in ((False, work), (True, BACKWARD_FLOPS * work))
    )
    return max(forward, rates.kernel_s), max(backward, rates.kernel_s)


def _passes(model: Transformer, share: Share, rates: Rates) -> tuple[float, float]:
    """Norms, residuals, activation, copies, sums of weight gradients."""
    size, t = share.element_bytes, share.tensor
    stream = share.tokens * model.hidden * share.stream_bytes / (t if share.sequence_parallel else 1)
    residual = (3 + (1 / share.stream_bytes if share.dropout else 0)) * stream
    copies = model.experts_per_token if model.experts else 1
    inner = model.fullest_rank(share.expert) * share.tokens * copies * model.feed_forward * size / t
    gate = GATE_PASSES[model.gated, share.eager]
    turned = 2 * model.heads * model.latent.rotary if model.latent else 0
    heads = share.tokens * (2 * model.attention_width + 2 * model.kv_width + turned) * size / t
    bias = 2 * pass_s(2 * stream, rates) if model.biases else 0.0
    rotary = pass_s(ROTARY_PASSES * heads / 2, rates) if share.eager and not model.positions else 0.0
    shared = 2 * pass_s(residual, rates) + pass_s(2 * heads, rates) + rotary
    shared += _permutation_s(model, share, rates)
    forward = shared + 2 * pass_s(2 * stream, rates) + pass_s(gate[0] * inner, rates)
    backward = shared + 2 * pass_s(4 * stream, rates) + pass_s(gate[1] * inner, rates) + bias
    return forward, backward + _weight_sums(model, share, rates)


def _permutation_s(model: Transformer, share: Share, rates: Rates) -> float:
    """Of one direction: copies of a token sorted by expert, and their weighted sum in the old order; where experts lie
    on several ranks, what arrives is sorted once more, and back."""
    if not model.experts:
        return 0.0
    copies = share.routed_tokens * model.experts_per_token * model.hidden * share.element_bytes
    return (2 if share.expert == 1 else 4) * pass_s(2 * copies, rates)


def _weight_sums(model: Transformer, share: Share, rates: Rates) -> float:
    """A weight's gradient of each microbatch added to its float32 sum, where the product does not do it itself."""
    if share.fused_weight_gradient:
        return 0.0
    experts = model.experts * expert_parameters(model) / share.expert if model.experts else 0.0
    dense = attention_parameters(model) + (0 if model.experts else expert_parameters(model))
    return pass_s((dense / share.tensor + experts) * (share.element_bytes + 4), rates)
