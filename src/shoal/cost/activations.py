"""Bytes that the backward of a layer needs from its forward (Korthikanti et al. arXiv:2205.05198, section 4).

For one layer of a 16-bit GPT with dropout, over b sequences of s tokens on t tensor ranks:

    no recomputation        sbh (10 + 24/t + 5as/ht)          with sequence parallelism  (sbh/t)(34 + 5as/h)
    selective, or flash     the same without 5as/h            full                        2sbh (input only)

The terms are kept apart below, so that any feed-forward width, grouped keys, gates and dtypes are counted, with dropout
or without. For that GPT they give the paper's numbers exactly; a test holds it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shoal.cost.flops import Recompute
from shoal.cost.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a stack keeps: bytes of a number, dropout (a byte of mask for each number), flash attention.

    `stream_bytes` are those of a number of the residual stream; `eager` keeps what a fused gate computes again.
    """

    element_bytes: float = 2.0
    stream_bytes: float = 2.0
    eager: bool = False
    dropout: bool = False
    flash_attention: bool = True

    @property
    def mask_bytes(self) -> float:
        """Bytes of a dropout mask for one number."""
        return 1.0 if self.dropout else 0.0


@functools.lru_cache(maxsize=1 << 14)
def layer_activation_bytes(
    model: Transformer,
    tokens: float,
    sequence: int,
    *,
    tensor: int,
    sequence_parallel: bool,
    recompute: Recompute,
    kept: Kept,
) -> float:
    """Bytes of one layer for `tokens` tokens of one rank (b x s / context), `sequence` keys each."""
    width_share = tensor if sequence_parallel else 1
    if recompute == "full":
        return kept.stream_bytes * tokens * model.hidden / width_share
    whole = _unsplit(model, kept) / width_share + _split(model, kept) / tensor
    square = 0.0 if recompute == "selective" or kept.flash_attention else _square(model, sequence, kept) / tensor
    return tokens * (whole + square)


def _unsplit(model: Transformer, kept: Kept) -> float:
    """Per token, what tensor ranks repeat: inputs of two norms and of two blocks, two masks. 10h for the GPT."""
    return model.hidden * (2 * kept.stream_bytes + 2 * kept.element_bytes + 2 * kept.mask_bytes)


def _split(model: Transformer, kept: Kept) -> float:
    """Per token, what tensor ranks share: q, k, v, attention's output, the feed-forward's inner numbers. 24h."""
    attention = 2 * model.attention_width + 2 * model.kv_width
    inner = ((4 if kept.eager else 3) if model.gated else 2) * model.feed_forward
    copies = model.experts_per_token if model.experts else 1
    routed = 2 * model.hidden * copies if model.experts else 0
    return kept.element_bytes * (attention + inner * copies + routed)


def _square(model: Transformer, sequence: int, kept: Kept) -> float:
    """Per token, the attention square: scores after softmax, dropped scores, mask. 5as for 16 bits with dropout."""
    numbers = 2 if kept.dropout else 1
    return model.heads * sequence * (numbers * kept.element_bytes + kept.mask_bytes)


def boundary_bytes(model: Transformer, tokens: float, *, element_bytes: float) -> float:
    """One activation between stages: 2sbh of 16 bits."""
    return element_bytes * tokens * model.hidden


def logit_bytes(model: Transformer, tokens: float, *, tensor: int, element_bytes: float) -> float:
    """Head and loss of one microbatch: float32 logits 4sbV/t, and the head's input."""
    return tokens * (4.0 * model.vocabulary + element_bytes * model.hidden) / tensor
