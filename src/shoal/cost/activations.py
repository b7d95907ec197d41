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

from shoal.cost.transformer import Recompute, Transformer, of_mean_layer
from shoal.schedules.table import Schedule


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a stack keeps: bytes of a number, dropout (a byte of mask for each number), flash attention.

    `stream_bytes` are those of a number of the residual stream; `eager` keeps what a fused gate computes again.
    `fused_loss`: the cross-entropy reads logits of the stack's dtype and writes their gradient, and keeps nothing else;
    otherwise float32 logits are kept, and their gradient is as large. `eager_loss`: besides those, logits and their
    gradient stay in the stack's dtype (PyTorch's cross-entropy of a cast). `whole_loss`: on each tensor rank.
    """

    element_bytes: float = 2.0
    stream_bytes: float = 2.0
    eager: bool = False
    dropout: bool = False
    flash_attention: bool = True
    fused_loss: bool = False
    eager_loss: bool = False
    whole_loss: bool = False

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
    expert: int = 1,
) -> float:
    """Bytes of one layer for `tokens` tokens of one rank (b x s / context), `sequence` keys each; where experts lie on
    several ranks, of the fullest one."""
    width_share = tensor if sequence_parallel else 1
    if recompute == "full":
        return kept.stream_bytes * tokens * model.hidden / width_share
    if recompute == "operators":
        second = of_mean_layer(model, lambda kind: _every_second(kind, kept, expert))
        return tokens * (kept.stream_bytes * model.hidden / width_share + second / tensor)
    split = of_mean_layer(model, lambda kind: _split(kind, kept, expert))
    whole = _unsplit(model, kept) / width_share + split / tensor
    square = 0.0 if recompute == "selective" or kept.flash_attention else _square(model, sequence, kept) / tensor
    return tokens * (whole + square)


def _unsplit(model: Transformer, kept: Kept) -> float:
    """Per token, what tensor ranks repeat: inputs of two norms and of two blocks, two masks. 10h for the GPT."""
    return model.hidden * (2 * kept.stream_bytes + 2 * kept.element_bytes + 2 * kept.mask_bytes)


def _split(model: Transformer, kept: Kept, expert: int) -> float:
    """Per token, what tensor ranks share: q, k, v, attention's output, the feed-forward's inner numbers. 24h."""
    attention = 2 * model.attention_width + 2 * model.kv_width
    attention += 2 * model.heads * model.latent.rotary if model.latent else 0
    inner = ((4 if kept.eager else 3) if model.gated else 2) * model.feed_forward
    copies = model.experts_per_token * model.fullest_rank(expert) if model.experts else 1
    routed = 2 * model.hidden * copies if model.experts else 0
    return kept.element_bytes * (attention + inner * copies + routed)


def _every_second(model: Transformer, kept: Kept, expert: int) -> float:
    """Per token, the outputs of every second product and of attention."""
    copies = model.experts_per_token * model.fullest_rank(expert) if model.experts else 1
    inner = (model.feed_forward_matrices - 1) * model.feed_forward + model.hidden
    products = model.attention_width + 2 * model.kv_width + model.hidden + copies * inner
    return kept.element_bytes * (products / 2 + model.attention_width)


def _square(model: Transformer, sequence: int, kept: Kept) -> float:
    """Per token, the attention square: scores after softmax, dropped scores, mask. 5as for 16 bits with dropout."""
    numbers = 2 if kept.dropout else 1
    return model.heads * sequence * (numbers * kept.element_bytes + kept.mask_bytes)


def boundary_bytes(model: Transformer, tokens: float, *, element_bytes: float) -> float:
    """One activation between stages: 2sbh of 16 bits."""
    return element_bytes * tokens * model.hidden


def loss_bytes(model: Transformer, tokens: float, *, tensor: int, kept: Kept, chunks: int = 1) -> float:
    """Head and loss of one microbatch: logits and their gradient (4sbV/t each in float32) of the tokens of one of
    `chunks`, and the head's input; where there are several, its gradient too."""
    each = 2 * (kept.element_bytes if kept.fused_loss else 4.0)
    each += 2 * kept.element_bytes if kept.eager_loss and not kept.fused_loss else 0.0
    split = 1 if kept.whole_loss else tensor
    inputs = (2 if chunks == 1 else 3) * kept.element_bytes * model.hidden / tensor
    return tokens * (each * model.vocabulary / split / chunks + inputs)


# How many microbatches' activations a pipeline rank holds at its peak, in units of one microbatch of its whole rank.
#
# GPipe, LoopedBFS      m                                     Huang et al. arXiv:1811.06965
# 1F1B                  min(m, p - i), rank i from 0          Narayanan et al. arXiv:2006.09503
# Interleaved1F1B       at most p (1 + (p-1)/(pv))            Korthikanti et al. arXiv:2205.05198
# InterleavedZeroBubble as Interleaved1F1B                    ZB-H1's memory rule, arXiv:2401.10241
# ZBVZeroBubble         p on every rank                       arXiv:2405.15362: 1F1B's peak, balanced
# DualPipeV             p + 1, with the parameters of 2 ranks DeepSeek-V3, arXiv:2412.19437


def in_flight(schedule: Schedule, rank: int, *, pipeline: int, virtual_stages: int, microbatches: int) -> float:
    """Microbatches held by pipeline rank `rank`, at most `microbatches`. `rank` counts from 0, the first stage."""
    if pipeline == 1:
        return 1.0
    first_come = float(pipeline - rank)
    held = {
        "GPipe": float(microbatches),
        "LoopedBFS": float(microbatches),
        "1F1B": first_come,
        "ZB-H1": first_come,
        "ZB-H2": 2 * first_come - 1,
        "Interleaved1F1B": _interleaved(rank, pipeline, virtual_stages),
        "InterleavedZeroBubble": _interleaved(rank, pipeline, virtual_stages),
        "ZBVZeroBubble": float(pipeline),
        "DualPipeV": float(pipeline + 1),
    }[schedule]
    return min(float(microbatches), held)


def _interleaved(rank: int, pipeline: int, virtual_stages: int) -> float:
    """Megatron's warm-up of 2(p - i - 1) + (v - 1)p chunks, one more in work, each 1/v of a rank."""
    return (2 * (pipeline - rank - 1) + (virtual_stages - 1) * pipeline + 1) / virtual_stages
