"""The sizes of a decoder-only transformer: all that the closed forms of this room need to know of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes, defaults resolved. `experts` = 0 is a dense model; otherwise every feed-forward is a mixture of experts of
    `feed_forward` features, beside `shared_feed_forward` features that every token goes through.

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

    def tensor_fits(self, ranks: int) -> bool:
        """Do `ranks` tensor ranks get whole heads and as many features each?"""
        kv_fits = self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0
        return self.heads % ranks == 0 and self.feed_forward % ranks == 0 and kv_fits

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
