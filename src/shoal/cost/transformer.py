"""The sizes of a decoder-only transformer: all that the closed forms of this room need to know of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): queries go through `query` features (0: as they
    are), keys and values through `keys` features, and `rotary` features a head carry positions, one key for all heads.
    """

    query: int
    keys: int
    rotary: int


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes, defaults resolved. `experts` = 0 is a dense model; otherwise every feed-forward is a mixture of experts of
    `feed_forward` features, beside `shared_feed_forward` features that every token goes through.

    `latent` is multi-head latent attention in the place of query, key and value.

    `dense_layers` of a mixture's layers have a plain feed-forward of `dense_feed_forward` features in its place.

    `expert_imbalance` is what the fullest expert gets over the mean of all (1: even). The fullest rank ends last, and
    the others wait for it.

    `biases` and `layer_norm` are GPT-2's: a bias on every linear layer, and norms with a bias. `positions` counts
    learned position vectors, 0 for rotary ones.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    gated: bool = False
    tied: bool = True
    biases: bool = False
    layer_norm: bool = False
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 1
    shared_feed_forward: int = 0
    dense_layers: int = 0
    dense_feed_forward: int = 0
    latent: Latent | None = None
    expert_imbalance: float = 1.0

    def __hash__(self) -> int:
        """Kept after the first use: a search looks thousands of things up by their model."""
        kept = self.__dict__.get("_hash")
        if kept is None:
            kept = hash(tuple(self.__dict__.values()))
            object.__setattr__(self, "_hash", kept)
        return kept

    @property
    def attention_width(self) -> int:
        """Features of the queries of all heads."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Features of the keys of all heads; as many again for the values."""
        return self.kv_heads * self.head_size

    @property
    def score_size(self) -> float:
        """Features of a head, the mean of its scores' and its values': what the square of attention costs."""
        return self.head_size + (self.latent.rotary / 2 if self.latent else 0)

    def tensor_fits(self, ranks: int) -> bool:
        """Do `ranks` tensor ranks get whole heads and as many features each?"""
        kv_fits = self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        features = (self.feed_forward, self.dense_feed_forward)
        return self.heads % ranks == 0 and all(number % ranks == 0 for number in features) and kv_fits

    def fullest_rank(self, ranks: int) -> float:
        """What the fullest of `ranks` ranks, which divide the experts, gets over the mean; 1 where there is one rank.

        The sum of n experts that are full independently of each other differs sqrt(n) times less from its mean.
        """
        if ranks == 1 or not self.experts:
            return 1.0
        excess = (self.expert_imbalance - 1) / math.sqrt(max(1, self.experts // ranks))
        return min(1 + excess, float(ranks))

    @property
    def feed_forward_matrices(self) -> int:
        """Matrices of hidden x feed_forward: two, or three where gated."""
        return 3 if self.gated else 2


def gpt(
    layers: int, hidden: int, heads: int, *, vocabulary: int = 51200, positions: int = 2048, feed_forward: int = 0
) -> Transformer:
    """A GPT-2/GPT-3 of Megatron-LM: biases, layer norm, learned positions, tied embedding, plain 4h feed-forward."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        feed_forward=feed_forward or 4 * hidden,
        vocabulary=vocabulary,
        biases=True,
        layer_norm=True,
        positions=positions,
    )


def llama(
    layers: int, hidden: int, heads: int, *, kv_heads: int, feed_forward: int, vocabulary: int, tied: bool = False
) -> Transformer:
    """A Llama (arXiv:2407.21783): no biases, RMSNorm, rotary positions, SwiGLU, grouped queries."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=hidden // heads,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        gated=True,
        tied=tied,
    )


# How many parameters, and where they lie.
#
# A layer: 2hd(a+g) of attention + 2hf (3hf gated) of feed-forward + norms and biases (Megatron-LM's
# `theoretical_memory_usage.py`). Embedding Vh, a second one for the head where it is not tied. A mixture has `experts`
# feed-forwards and a router of h x experts.


def attention_shapes(model: Transformer, tensor: int = 1) -> list[tuple[int, int]]:
    """(columns, inner) of the matrices of one layer's attention on one of `tensor` ranks: query, key and value; output.

    Every rank computes the latent features whole.
    """
    hidden, own = model.hidden, max(1, model.attention_width // tensor)
    if model.latent is None:
        kv = max(model.head_size, model.kv_width // tensor)
        return [(own + 2 * kv, hidden), (hidden, own)]
    latent, turned = model.latent, max(1, model.heads * model.latent.rotary // tensor)
    query = [(latent.query, hidden), (own + turned, latent.query)] if latent.query else [(own + turned, hidden)]
    return [*query, (latent.keys + latent.rotary, hidden), (2 * own, latent.keys), (hidden, own)]


def attention_parameters(model: Transformer) -> int:
    """Matrices of one layer's attention."""
    return sum(columns * inner for columns, inner in attention_shapes(model))


@functools.lru_cache(maxsize=64)
def layer_kinds(model: Transformer) -> tuple[tuple[float, Transformer], ...]:
    """(share of the layers, a model of such layers only): one kind, or mixtures and the dense layers between them."""
    if not model.dense_layers:
        return ((1.0, model),)
    dense, mixed = model.dense_layers / model.layers, replace(model, dense_layers=0, dense_feed_forward=0)
    plain = replace(mixed, experts=0, experts_per_token=1, shared_feed_forward=0, feed_forward=model.dense_feed_forward)
    return ((1 - dense, mixed), (dense, plain))


def of_mean_layer(model: Transformer, number: Callable[[Transformer], float]) -> float:
    """`number` of a layer, the mean over all of them."""
    return sum(share * number(kind) for share, kind in layer_kinds(model))


@functools.lru_cache(maxsize=64)
def expert_parameters(model: Transformer) -> int:
    """Matrices of one feed-forward, which is one expert where there are several."""
    return model.feed_forward_matrices * model.hidden * model.feed_forward


@functools.lru_cache(maxsize=64)
def dense_layer_parameters(model: Transformer) -> float:
    """The mean layer without its experts: what every rank of a tensor group shares."""
    return of_mean_layer(model, _dense_parameters)


@functools.lru_cache(maxsize=64)
def expert_layer_parameters(model: Transformer) -> float:
    """All experts of the mean layer."""
    return of_mean_layer(model, lambda kind: kind.experts * expert_parameters(kind))


def layer_parameters(model: Transformer) -> float:
    """The mean layer, all of it."""
    return dense_layer_parameters(model) + expert_layer_parameters(model)


def matmul_parameters(model: Transformer) -> float:
    """What the mean layer multiplies a token with: of a mixture, its own experts, the shared ones and the router."""
    return of_mean_layer(model, _met_by_a_token)


def _dense_parameters(model: Transformer) -> float:
    feed_forward = _shared(model) if model.experts else expert_parameters(model)
    return attention_parameters(model) + feed_forward + _vectors(model)


def _met_by_a_token(model: Transformer) -> float:
    copies = model.experts_per_token if model.experts else 1
    shared = _shared(model) if model.experts else 0
    return attention_parameters(model) + copies * expert_parameters(model) + shared


def embedding_parameters(model: Transformer) -> int:
    """Token and position vectors in front of the first layer."""
    return model.vocabulary * model.hidden + model.positions * model.hidden


def head_parameters(model: Transformer) -> int:
    """The output matrix where it is its own, and the last norm."""
    return (0 if model.tied else model.vocabulary * model.hidden) + _norm(model)


def total_parameters(model: Transformer) -> int:
    """The whole model, tied weights counted once."""
    return round(model.layers * layer_parameters(model)) + embedding_parameters(model) + head_parameters(model)


def _shared(model: Transformer) -> int:
    """A mixture's router, and the features that every token goes through."""
    return model.hidden * (model.experts + model.feed_forward_matrices * model.shared_feed_forward)


def _norm(model: Transformer) -> int:
    return (2 if model.layer_norm else 1) * model.hidden


def _vectors(model: Transformer) -> int:
    """Two norms, and the biases of four linear layers where there are any."""
    biases = model.attention_width + 2 * model.kv_width + 2 * model.hidden + model.feed_forward if model.biases else 0
    return 2 * _norm(model) + biases


# Floating-point operations, a multiply-add counted as two.
#
# Forward of a layer over b sequences of s tokens: 2bs x (matmul parameters) + 4 b s^2 a d x kappa, kappa = 1/2 where
# causal attention is counted as half. Backward is twice the forward; recomputation adds what it repeats. Logits 2bshV.
#
# Two conventions, and every figure names its own: "causal" counts half of the attention square (this project's MFU);
# "full" counts all of it (Narayanan et al. arXiv:2104.04473, Korthikanti et al. arXiv:2205.05198 appendix A):
# 72 B L s h^2 (1 + s/6h + V/12Lh) a step for a GPT without recomputation.


Recompute = Literal["none", "selective", "operators", "full"]
"""What the backward computes again: nothing; the square of attention; all but attention and every second product (the
per-operator policy of torchtitan); all."""
Convention = Literal["causal", "full"]


def attention_flops(model: Transformer, sequences: int, sequence: int, *, convention: Convention = "causal") -> float:
    """Scores and weighted values of one layer, forward."""
    square = 4.0 * sequences * sequence**2 * model.heads * model.score_size
    return square / 2 if convention == "causal" else square


def layer_flops(model: Transformer, sequences: int, sequence: int, *, convention: Convention = "causal") -> float:
    """One layer, forward."""
    matmul = 2.0 * sequences * sequence * matmul_parameters(model)
    return matmul + attention_flops(model, sequences, sequence, convention=convention)


def logit_flops(model: Transformer, sequences: int, sequence: int) -> float:
    """The output matrix, forward."""
    return 2.0 * sequences * sequence * model.hidden * model.vocabulary


def model_flops(model: Transformer, sequences: int, sequence: int, *, convention: Convention = "causal") -> float:
    """One step, forward and backward, nothing repeated: the numerator of MFU."""
    forward = model.layers * layer_flops(model, sequences, sequence, convention=convention)
    return 3 * (forward + logit_flops(model, sequences, sequence))


# The matrices of a transformer's parameters, one by one, as this project's GPT keeps them: query, key and value apart.
#
# What a low-rank codec sends of a gradient follows from their shapes.


Shapes = tuple[tuple[int, int, int], ...]
"""(rows, columns, how many of them)"""


def matrix_shapes(model: Transformer, *, layers: float, embedding: bool, head: bool) -> Shapes:
    """Of a stage with so many layers, and the `embedding` and the `head` of the model where it holds them."""
    found = [shape for share, kind in layer_kinds(model) for shape in _of_layers(kind, round(share * layers))]
    if embedding:
        found.append((model.vocabulary, model.hidden, 1))
    if head and not (model.tied and embedding):
        found.append((model.vocabulary, model.hidden, 1))
    return tuple(shape for shape in found if shape[2])


def _of_layers(model: Transformer, layers: int) -> Iterator[tuple[int, int, int]]:
    hidden, own = model.hidden, model.attention_width
    yield own, hidden, layers
    yield model.kv_width, hidden, 2 * layers
    yield hidden, own, layers
    wide = model.feed_forward_matrices - 1
    copies = max(1, model.experts) * layers
    yield model.feed_forward, hidden, wide * copies
    yield hidden, model.feed_forward, copies
    if model.experts:
        yield model.experts, hidden, layers
    if model.experts and model.shared_feed_forward:
        yield model.shared_feed_forward, hidden, wide * layers
        yield hidden, model.shared_feed_forward, layers
