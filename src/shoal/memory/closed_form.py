"""Bytes that one GPT block keeps for the backward: closed forms (as arXiv:2205.05198 counts them, for these blocks).

In numbers a token, with width w, q = heads x head_size, k = kv_heads x head_size, hidden width f:

    two norms          2 x (input w, normalised w, output w), and a float32 scale each
    attention          query q, key k, value k, result q; and a log-sum-exp of each head
    feed-forward       SwiGLU 4 f (gate, its activation, up, product), GELU 2 f
    dropout            2 w, the scaled masks, where there is dropout
    documents          a mask as numbers: `seq` for each token

`selective` keeps all but the log-sum-exp and the mask; `full` the input of the block alone, w; `operators` also the
result of attention with its log-sum-exp, and the outputs of every second product: key, attention's output w, and f of
SwiGLU or w of GELU. Masks of documents, where attention is split over context ranks, are made anew in the backward and
not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.models.config import GPTConfig

if TYPE_CHECKING:
    from shoal.memory.recompute import RecomputeKind

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The microbatch of a rank: `tokens` over all its samples, in numbers of `element_bytes` (no autocast).

    `mask_length` is the length of the sequences where they have documents, else 0.
    """

    tokens: int
    element_bytes: int
    mask_length: int = 0


def block_saved_bytes(config: GPTConfig, activations: Activations, *, kind: RecomputeKind) -> int:
    """Bytes that a dense block keeps from its forward to its backward."""
    element_bytes = activations.element_bytes
    if kind == "full":
        return activations.tokens * config.width * element_bytes
    if kind == "operators":
        lse_bytes = config.heads * max(FLOAT32_BYTES, element_bytes)
        return activations.tokens * (_outputs(config) * element_bytes + lse_bytes)
    kept = activations.tokens * (_numbers(config) * element_bytes + 2 * FLOAT32_BYTES)
    return kept if kind == "selective" else kept + _core_bytes(config, activations)


def _numbers(config: GPTConfig) -> int:
    """Numbers a token outside the attention core."""
    keys = config.key_value_heads * config.size_of_head
    feed_forward = (4 if config.feed_forward == "swiglu" else 2) * config.hidden_width
    queries = config.heads * config.size_of_head
    return 6 * config.width + 2 * queries + 2 * keys + feed_forward + (2 * config.width if config.dropout else 0)


def _outputs(config: GPTConfig) -> int:
    """Numbers a token of the input and of what `operators` keeps: attention's result, key, output, up (or down)."""
    keys = config.key_value_heads * config.size_of_head
    return (
        2 * config.width
        + config.heads * config.size_of_head
        + keys
        + (config.hidden_width if config.feed_forward == "swiglu" else config.width)
    )


def _core_bytes(config: GPTConfig, activations: Activations) -> int:
    """What only the attention core needs: log-sum-exps, float32 at least, and the mask."""
    lse_bytes = config.heads * max(FLOAT32_BYTES, activations.element_bytes)
    return activations.tokens * (lse_bytes + activations.mask_length * activations.element_bytes)
