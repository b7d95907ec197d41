"""Attention over one tile of queries and keys, with the log-sum-exp that puts tiles together.

    scores = q k^T / sqrt(head_size),   lse = log sum_j exp(scores_j),   out = exp(scores - lse) v

The backward takes the `out` and `lse` of the *whole* row, over all tiles, and gives this tile's terms of the
gradients (FlashAttention-2, arXiv:2307.08691, section 3.1):

    p = exp(scores - lse),  dv = p^T do,  ds = p (do v^T - sum(do out)),  dq = ds k / sqrt(.),  dk = ds^T q / sqrt(.)

A row that sees no key of its tile has `out` 0 and `lse` -inf. All tensors are `[batch, heads, rows, head_size]` with as
many key as query heads; `lse` is `[batch, heads, rows]`, float32 at least; `seen` is a boolean mask `[batch, 1, rows,
keys]`, and excludes `causal`, for which there are as many keys as rows.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
LARGEST_CUDA_HEAD = 256

Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """One way to compute a tile."""

    needs_mask: bool
    """Whether scores are written to memory, so that tiles must be small, and `causal` is said as a mask."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        """The tile's terms of the gradients of query, key and value, from the gradient of the whole row's `out`."""
        ...


class Plain:
    """The equations as they stand: any device and type, and the oracle of the others. Not for `causal`."""

    needs_mask = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(query, key, seen)
        lse = scores.logsumexp(-1)
        out = (scores - _finite(lse)[..., None]).exp() @ _wide(value)
        return out.to(query.dtype), lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        wide_grad = _wide(grad)
        weights = (_scores(query, key, seen) - lse[..., None]).exp()
        own = (wide_grad * out).sum(-1, keepdim=True)
        grad_scores = weights * (wide_grad @ _wide(value).mT - own) / math.sqrt(query.shape[-1])
        return grad_scores @ _wide(key), grad_scores.mT @ _wide(query), weights.mT @ wide_grad


class CpuFlash:
    """PyTorch's fused kernel for CPUs."""

    needs_mask = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = _CPU(query, key, value, 0.0, causal, attn_mask=_added(seen, query))
        # The kernel answers 0 for a row that sees nothing.
        return out, lse if seen is None else lse.masked_fill(~seen.any(-1), -torch.inf)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        return _CPU_BACKWARD(grad, query, key, value, out, lse, 0.0, causal, attn_mask=_added(seen, query))


class CudaFlash:
    """PyTorch's fused kernel for GPUs; no masks, half precision only."""

    needs_mask = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _CUDA(query, key, value, 0.0, causal)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        seen: Tensor | None,
    ) -> Gradients:
        no_random_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # without dropout it is not read
        return _CUDA_BACKWARD(
            grad, query, key, value, out, lse, None, None, query.shape[2], key.shape[2], 0.0, causal,
            no_random_state, no_random_state,
        )  # fmt: skip


def kernel_for(query: Tensor, *, masked: bool) -> Kernel:
    """The fastest kernel that can do it."""
    if query.device.type == "cpu":
        return CpuFlash()
    half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= LARGEST_CUDA_HEAD
    return CudaFlash() if query.device.type == "cuda" and half and fits and not masked else Plain()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scores(query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:
    scores = _wide(query) @ _wide(key).mT / math.sqrt(query.shape[-1])
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """-inf as 0: what is subtracted from scores that are all -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _added(seen: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as numbers to add to the scores."""
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, -torch.inf)
