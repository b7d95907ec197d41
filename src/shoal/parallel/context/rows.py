"""Attention of a rank's queries, added up tile by tile, and its gradients.

Tiles t of the same rows are merged by their log-sum-exp (arXiv:2310.01889, arXiv:2307.08691):

    lse = log sum_t exp(lse_t),   out = sum_t exp(lse_t - lse) out_t

The backward needs `out` and `lse` alone, so nothing of a tile is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.parallel.context.kernels import kernel_for
from shoal.parallel.context.tiles import Documents, Tile, pieces


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which terms are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Rows:
    """The forward. `query` `[batch, heads, rows, head_size]`; `out` like it and `lse` `[batch, heads, rows]`, wide."""

    def __init__(self, query: Tensor) -> None:
        wide = wide_dtype(query.dtype)
        self.query = query
        # Heads lie beside each other, so that the projection after attention takes `out` as it is and not a copy.
        batch, heads, length, head_size = query.shape
        self.out = torch.zeros((batch, length, heads, head_size), dtype=wide, device=query.device).transpose(1, 2)
        self.lse = torch.full(query.shape[:-1], -torch.inf, dtype=wide, device=query.device)

    def add(self, tile: Tile, key: Tensor, value: Tensor, *, documents: Documents | None) -> None:
        """Takes in a tile; `key` and `value` are `[batch, kv_heads, keys, head_size]`, `kv_heads` a divisor."""
        kernel = kernel_for(self.query, masked=documents is not None)
        heads = self.query.shape[1]
        for piece in pieces(tile, self.query, documents, kernel=kernel):
            keys, values = (_spread(x[:, :, piece.keys], heads) for x in (key, value))
            query = self.query[:, :, piece.rows]
            out, lse = kernel.forward(query, keys, values, causal=piece.causal, seen=piece.seen)
            self._merge(piece.rows, out, lse)

    def _merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after == -torch.inf, 0.0)  # rows that have seen nothing yet
        kept = self.out[:, :, rows] * (before - base).exp()[..., None]
        self.out[:, :, rows] = kept + out * (lse - base).exp()[..., None]
        self.lse[:, :, rows] = after


class RowsBackward:
    """The backward of `Rows`, from `out`, `lse` and the gradient of `out`. `grad_query` is wide."""

    def __init__(self, grad: Tensor, query: Tensor, *, out: Tensor, lse: Tensor) -> None:
        self.grad, self.query, self.out, self.lse = grad, query, out, lse
        self.grad_query = torch.zeros(query.shape, dtype=wide_dtype(query.dtype), device=query.device)

    def add(
        self,
        tile: Tile,
        key: Tensor,
        value: Tensor,
        *,
        documents: Documents | None,
        grad_key: Tensor,
        grad_value: Tensor,
    ) -> None:
        """Adds the tile's terms to `grad_query`, and in place to `grad_key` and `grad_value`, like `key` and wide."""
        kernel = kernel_for(self.query, masked=documents is not None)
        heads, kv_heads = self.query.shape[1], key.shape[1]
        for piece in pieces(tile, self.query, documents, kernel=kernel):
            grad, query, out, lse = (x[:, :, piece.rows] for x in (self.grad, self.query, self.out, self.lse))
            keys, values = (_spread(x[:, :, piece.keys], heads) for x in (key, value))
            of_query, of_key, of_value = kernel.backward(
                grad, query, keys, values, out=out, lse=lse, causal=piece.causal, seen=piece.seen
            )
            self.grad_query[:, :, piece.rows] += of_query
            grad_key[:, :, piece.keys] += _gathered(of_key, kv_heads)
            grad_value[:, :, piece.keys] += _gathered(of_value, kv_heads)


def _spread(x: Tensor, heads: int) -> Tensor:
    """`[batch, kv_heads, ...]` with each head as often as query heads share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _gathered(x: Tensor, kv_heads: int) -> Tensor:
    """The adjoint of `_spread`: summed over the query heads that share a head, in a wide type."""
    if x.shape[1] == kv_heads:
        return x
    return x.unflatten(1, (kv_heads, -1)).sum(2, dtype=wide_dtype(x.dtype))
