"""What a layer, the head and the optimizer cost on one rank: by the roofline of a data sheet, or by measured operators.

Measured prices are sums over the operators that an eager GPT of this project launches, each at its own size, from the
sweep of `shoal bench products`. They hold what a roofline cannot know of a CPU: what a launch costs, how products of
each shape run, and what fresh memory costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.cost.matmul import Matmul, Rates, matmul_s, pass_s
from shoal.cost.operators import LayerSeconds, Share, head_seconds, layer_seconds
from shoal.cost.sweep import Sweep
from shoal.cost.transformer import Transformer, attention_parameters, expert_parameters

FLOAT_BYTES = 4
ADAM_BYTES = 7 * FLOAT_BYTES
"""What the measured step of Adam moves for a parameter: its gradient once, the weight and two moments twice."""
PASS_COLUMNS = 128
"""Of the matrix by whose copy a pass over memory is priced."""
CAUSAL_FORWARD, CAUSAL_BACKWARD = 2.0, 5.0
"""Operations of fused attention for a head, a query, a key and a feature, half of them masked (arXiv:2205.14135)."""


@dataclass(frozen=True)
class Heads:
    """Fused attention of `heads` heads (of all samples), `tokens` queries, `size` features."""

    heads: int
    tokens: int
    size: int


class Prices(Protocol):
    """Seconds on one rank, communication aside."""

    @property
    def memory_bytes_s(self) -> float:
        """Bytes read and written in a second by a plain pass."""
        ...

    def layer(self, model: Transformer, share: Share) -> LayerSeconds:
        """One layer of one microbatch."""
        ...

    def head(self, model: Transformer, share: Share) -> tuple[float, float, float]:
        """(products, loss, embedding) of one microbatch, forward and backward."""
        ...

    def update(self, numbers: float, *, update_bytes: float) -> float:
        """The optimizer's step over `numbers` parameters, for each of which it moves `update_bytes`."""
        ...

    def copy(self, rows: float, columns: float, *, element_bytes: float) -> float:
        """`[rows, columns]` in another order, into fresh memory."""
        ...

    def product(self, matmul: Matmul, *, element_bytes: float) -> float:
        """One (batched) matrix product."""
        ...

    def fused_attention(self, flops: float, shape: Heads, *, backward: bool) -> float:
        """One call of fused attention; `flops` are its own, those under a causal mask counted as half."""
        ...

    def passed(self, size: float) -> float:
        """One operator that reads and writes `size` bytes and computes next to nothing."""
        ...


@dataclass(frozen=True)
class RooflinePrices:
    """From rates alone."""

    rates: Rates

    @property
    def memory_bytes_s(self) -> float:
        return self.rates.memory_bytes_s

    def layer(self, model: Transformer, share: Share) -> LayerSeconds:
        return layer_seconds(model, share, self.rates)

    def head(self, model: Transformer, share: Share) -> tuple[float, float, float]:
        return head_seconds(model, share, self.rates)

    def update(self, numbers: float, *, update_bytes: float) -> float:
        return numbers * update_bytes / self.rates.memory_bytes_s

    def copy(self, rows: float, columns: float, *, element_bytes: float) -> float:
        return 2 * rows * columns * element_bytes / self.rates.memory_bytes_s

    def product(self, matmul: Matmul, *, element_bytes: float) -> float:
        return matmul_s(matmul, self.rates, element_bytes=element_bytes)

    def fused_attention(self, flops: float, shape: Heads, *, backward: bool) -> float:
        rate = self.rates.attention_flops_s(head_size=shape.size, tokens=shape.tokens, backward=backward)
        return max(flops / rate, self.rates.kernel_s)

    def passed(self, size: float) -> float:
        return pass_s(size, self.rates)


@dataclass(frozen=True)
class MeasuredPrices:
    """From sweeps of operators and the rate of a plain copy; `factor` multiplies all seconds."""

    sweeps: Mapping[str, Sweep]
    copy_bytes_s: float
    factor: float = 1.0

    @property
    def memory_bytes_s(self) -> float:
        return self.copy_bytes_s / self.factor

    def layer(self, model: Transformer, share: Share) -> LayerSeconds:
        forward, backward = self._products(model, share)
        attention = self._attention(model, share)
        passes = self._passes(model, share)
        x = self.factor
        return LayerSeconds(
            matmul_forward=x * forward,
            matmul_input=x * backward / 2,
            matmul_weight=x * backward / 2,
            attention_forward=x * attention[0],
            attention_backward=x * attention[1],
            passes_forward=x * passes[0],
            passes_backward=x * passes[1],
            last_product=x * self._linear(share.tokens, model.hidden, model.feed_forward / share.tensor)[0],
        )

    def head(self, model: Transformer, share: Share) -> tuple[float, float, float]:
        columns = max(1, model.vocabulary // share.tensor)
        products = sum(self._linear(share.tokens, columns, model.hidden))
        loss = sum(self.sweeps["loss"].seconds(share.tokens, columns))
        norm = sum(self.sweeps["norm"].seconds(share.tokens, model.hidden))
        embedding = sum(self.sweeps["embedding"].seconds(share.tokens, model.hidden))
        return self.factor * products, self.factor * loss, self.factor * (embedding + norm)

    def update(self, numbers: float, *, update_bytes: float) -> float:
        """The measured step of Adam, or as much of it as an optimizer with fewer slots moves; what is moved beyond it,
        for the norm and the clip of the gradient, at the rate of a copy."""
        step = self.sweeps["adam"].seconds(numbers)[0] * min(1.0, update_bytes / ADAM_BYTES)
        return self.factor * (step + max(0.0, update_bytes - ADAM_BYTES) * numbers / self.copy_bytes_s)

    def copy(self, rows: float, columns: float, *, element_bytes: float) -> float:
        return self.factor * self.sweeps["copy"].seconds(rows, columns)[0]

    def product(self, matmul: Matmul, *, element_bytes: float) -> float:
        """As the forward of a linear layer; a batch of products is launched once."""
        return self.factor * self._linear(matmul.batch * matmul.rows, matmul.columns, matmul.inner)[0]

    def fused_attention(self, flops: float, shape: Heads, *, backward: bool) -> float:
        """By its arithmetic, at the rate of causal attention of the same shape."""
        seconds = self.sweeps["attention"].seconds(shape.heads, shape.tokens, shape.size)[backward]
        measured_flops = (CAUSAL_BACKWARD if backward else CAUSAL_FORWARD) * shape.heads * shape.tokens**2 * shape.size
        return self.factor * seconds * flops / measured_flops

    def passed(self, size: float) -> float:
        """As a copy of so many bytes into fresh memory."""
        return self.copy(size / (2 * FLOAT_BYTES * PASS_COLUMNS), PASS_COLUMNS, element_bytes=FLOAT_BYTES)

    def _linear(self, m: float, n: float, k: float) -> tuple[float, float]:
        return self.sweeps["linear"].seconds(m, n, k)

    def _products(self, model: Transformer, share: Share) -> tuple[float, float]:
        """Query, key, value and output, up (and gate) and down: each a layer of its own."""
        tokens, t, hidden = share.tokens, share.tensor, model.hidden
        own, kv = model.attention_width / t, max(model.head_size, model.kv_width / t)
        inner = model.feed_forward / t
        shapes = [(own, hidden), (kv, hidden), (kv, hidden), (hidden, own)]
        shapes += [(inner, hidden)] * (model.feed_forward_matrices - 1) + [(hidden, inner)]
        both = [self._linear(tokens, n, k) for n, k in shapes]
        return sum(f for f, _ in both), sum(b for _, b in both)

    def _attention(self, model: Transformer, share: Share) -> tuple[float, float]:
        """Every token of this rank's against all keys before it: 1 / context of the whole square. A ring computes it
        in as many shorter pieces."""
        heads, pieces = share.samples * max(1.0, model.heads / share.tensor), share.context
        if share.ring:
            both = self.sweeps["attention"].seconds(heads, share.sequence / pieces, model.head_size)
            return pieces * both[0], pieces * both[1]
        both = self.sweeps["attention"].seconds(heads, share.sequence, model.head_size)
        return both[0] / pieces, both[1] / pieces

    def _passes(self, model: Transformer, share: Share) -> tuple[float, float]:
        """Two norms with their residuals, the gate, rotary queries and keys."""
        tokens, t = share.tokens, share.tensor
        rows = tokens / t if share.sequence_parallel else tokens
        norm = self.sweeps["norm"].seconds(rows, model.hidden)
        gate = self.sweeps["gate" if model.gated else "gelu"].seconds(tokens, model.feed_forward / t)
        query = self.sweeps["rotary"].seconds(tokens, model.attention_width / t)
        key = self.sweeps["rotary"].seconds(tokens, max(model.head_size, model.kv_width / t))
        pairs = [norm, norm, gate, query, key]
        return sum(f for f, _ in pairs), sum(b for _, b in pairs) + self._weight_sums(model, share)

    def _weight_sums(self, model: Transformer, share: Share) -> float:
        """A microbatch's gradient added to its place in a bucket: two reads and a write; the first is but copied."""
        numbers = (attention_parameters(model) + expert_parameters(model)) / share.tensor
        return numbers * 3 * FLOAT_BYTES / self.copy_bytes_s
