"""Seconds of the operators of one transformer layer on one rank, as a training stack launches them.

An operator takes the slower of its arithmetic and its memory traffic (the roofline, Williams et al. 2009). A matrix
multiply [m, k] x [k, n] is cut into tiles, which run in waves on the device's units: T tiles on U units take
ceil(T/U) waves, so that a last wave that is half empty costs as much as a full one. One tile does 2 x rows x columns x
(k + PROLOGUE) operations at its unit's share of the rate; smaller tiles re-use less of what they load and run at the
stated share of it. The best of five tile shapes is taken. That is the one curve of matrix-multiply efficiency here: at
large shapes it tends to the device's `matmul_efficiency`.

Source of the wave model: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation).

Matrix multiplies carry their shapes; everything else is a pass over memory with the bytes it moves. What is fused is
what Megatron-LM fuses (bias and GELU; bias, dropout and residual; scale, mask and softmax). With n numbers of the
residual stream in a rank's microbatch, e bytes each:

    norm 2ne, backward 4ne              residual with dropout 3ne + mask            activation 2fe, backward 3fe
    a mixture sorts k copies of each token by expert and adds them up again: 2kne each, either way
    softmax 2qe, backward 3qe, dropout 2qe + mask      (q = b a s^2 / t scores; none of it with flash attention)
    copies of q, k, v and of the heads' output          sums of weight gradients where no product does them

Fused attention runs at the published rates of its kernel: `cost.attention`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import MappingProxyType

from shoal.cost.attention import BACKWARD_FLOPS, Kernel, attention_share
from shoal.cost.transformer import Transformer, attention_parameters, expert_parameters
from shoal.topology.cluster import Architecture

TILES = ((2, 1, 1.0), (1, 2, 1.0), (1, 1, 0.92), (1, 0.5, 0.75), (0.5, 0.5, 0.5))
"""Rows and columns in edges of the device's tile (128 on a GPU), share of the best rate; assumed, from the bytes that
each tile loads for an operation: 1, 1, 1.33, 2 and 2.67 times those of the largest."""

PROLOGUE = 1.6
"""Inner length, in edges, that filling and draining one tile costs: 200 on a GPU; assumed, a few loads deep."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches: matrix multiply FLOP/s, memory bytes/s, units, seconds that a kernel takes at least.

    `peak_flops_s` is the rate of which published attention kernels are shares.
    """

    matmul_flops_s: float
    peak_flops_s: float
    memory_bytes_s: float
    units: int
    kernel_s: float
    tile: int = 128
    architecture: Architecture = "ampere"
    attention: Kernel = "best"

    def attention_flops_s(self, *, head_size: float, tokens: float, backward: bool) -> float:
        """FLOP/s of fused causal attention over `tokens` tokens."""
        share = attention_share(
            self.architecture, self.attention, head_size=head_size, tokens=tokens, backward=backward
        )
        return self.peak_flops_s * share


@dataclass(frozen=True)
class Matmul:
    """`batch` products of [rows, inner] and [inner, columns]."""

    rows: int
    columns: int
    inner: int
    batch: int = 1

    @property
    def flops(self) -> float:
        """Operations, a multiply-add counted as two."""
        return 2.0 * self.batch * self.rows * self.columns * self.inner

    @property
    def numbers(self) -> float:
        """Numbers that are read and written once."""
        return float(self.batch) * (self.rows * self.inner + self.inner * self.columns + self.rows * self.columns)

    def input_gradient(self) -> Matmul:
        """The product that gives the gradient of the first factor."""
        return Matmul(self.rows, self.inner, self.columns, self.batch)

    def weight_gradient(self) -> Matmul:
        """The product that gives the gradient of the second factor."""
        return Matmul(self.inner, self.columns, self.rows, self.batch)


def matmul_s(product: Matmul, rates: Rates, *, element_bytes: float) -> float:
    """Seconds of one (batched) matrix multiply."""
    arithmetic = _waves_s(product.rows, product.columns, product.inner, product.batch, rates.units, rates.tile)
    traffic = product.numbers * element_bytes / rates.memory_bytes_s
    return max(arithmetic / rates.matmul_flops_s, traffic, rates.kernel_s)


def pass_s(size: float, rates: Rates) -> float:
    """Seconds of an element-wise kernel that moves `size` bytes."""
    return size / rates.memory_bytes_s + rates.kernel_s


@functools.lru_cache(maxsize=1 << 16)
def _waves_s(rows: int, columns: int, inner: int, batch: int, units: int, edge: int) -> float:
    """Operations of all waves, the empty places of the last one included, at the whole device's rate."""
    best = math.inf
    for tall, wide, share in TILES:
        height, width = tall * edge, wide * edge
        tiles = math.ceil(rows / height) * math.ceil(columns / width) * batch
        waves = math.ceil(tiles / units)
        best = min(best, waves * units * 2.0 * height * width * (inner + PROLOGUE * edge) / share)
    return best


GATE_PASSES = MappingProxyType(
    {(False, False): (2, 3), (False, True): (2, 3), (True, False): (3, 5), (True, True): (5, 8)}
)
"""(gated, eager) -> numbers read and written for each number of the feed-forward's inner width: forward, backward."""

ROTARY_PASSES = 10
"""Numbers read and written for each number of queries and keys: two products, a turn, a sum, casts; counted, eager."""


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
    ring: bool = False

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
    """Roofline seconds of one layer on one rank, communication aside."""
    products = _products(model, share)
    size = share.element_bytes
    attention = _flash(model, share, rates) if share.flash_attention else _plain_attention(model, share, rates)
    passes = _passes(model, share, rates)
    return LayerSeconds(
        matmul_forward=sum(matmul_s(p, rates, element_bytes=size) for p in products),
        matmul_input=sum(matmul_s(p.input_gradient(), rates, element_bytes=size) for p in products),
        matmul_weight=sum(matmul_s(p.weight_gradient(), rates, element_bytes=size) for p in products),
        attention_forward=attention[0],
        attention_backward=attention[1],
        passes_forward=passes[0],
        passes_backward=passes[1],
        last_product=matmul_s(products[-1], rates, element_bytes=size),
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
    loss = pass_s(tokens * columns * passes, rates)
    return products, loss, pass_s(4 * share.element_bytes * tokens * model.hidden, rates)


def _products(model: Transformer, share: Share) -> list[Matmul]:
    """Linear layers of one layer: query-key-value, output, feed-forward or this rank's experts."""
    tokens, t = share.tokens, share.tensor
    own = max(1, model.attention_width // t)
    kv = max(model.head_size, model.kv_width // t)
    products = [Matmul(tokens, own + 2 * kv, model.hidden), Matmul(tokens, model.hidden, own)]
    rows, copies, inner = tokens, 1, max(1, model.feed_forward // t)
    if model.experts:
        copies = max(1, model.experts // share.expert)
        routed = share.routed_tokens
        rows = max(1, routed * model.experts_per_token * share.expert // model.experts)
        inner = model.feed_forward
        products.append(Matmul(routed, model.experts, model.hidden))
        if model.shared_feed_forward:
            products += _feed_forward(model, tokens, max(1, model.shared_feed_forward // t), 1)
    return products + _feed_forward(model, rows, inner, copies)


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
    work = 4.0 * share.samples * share.sequence**2 / share.context * own * model.head_size / 2
    tokens = share.sequence / share.context if share.ring else share.sequence
    forward, backward = (
        flops / rates.attention_flops_s(head_size=model.head_size, tokens=tokens, backward=way)
        for way, flops in ((False, work), (True, BACKWARD_FLOPS * work))
    )
    return max(forward, rates.kernel_s), max(backward, rates.kernel_s)


def _passes(model: Transformer, share: Share, rates: Rates) -> tuple[float, float]:
    """Norms, residuals, activation, copies, sums of weight gradients."""
    size, t = share.element_bytes, share.tensor
    stream = share.tokens * model.hidden * share.stream_bytes / (t if share.sequence_parallel else 1)
    residual = (3 + (1 / share.stream_bytes if share.dropout else 0)) * stream
    copies = model.experts_per_token if model.experts else 1
    inner = share.tokens * copies * model.feed_forward * size / t
    gate = GATE_PASSES[model.gated, share.eager]
    heads = share.tokens * (2 * model.attention_width + 2 * model.kv_width) * size / t
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
