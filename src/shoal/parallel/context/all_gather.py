"""Attention over gathered keys and values (Llama 3, arXiv:2407.21783, section 3.3.2).

Each rank gathers the keys and values of the whole sequence, which grouped-query heads make small beside the queries,
and computes its own rows. The backward gathers them again, so that none is kept, and reduce-scatters their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective
from shoal.parallel.context.core import SEQUENCE, ContextCore, by_rank, gathered, in_sequence
from shoal.parallel.context.tiles import Documents, Rows, RowsBackward, tiles_of_sequence, wide_dtype


class GatheredAttention(ContextCore):
    """`ContextCore` by an all-gather."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        all_documents = None if documents is None else in_sequence(gathered(self.group, documents), dim=-1)
        return _Gathered.apply(query, key, value, documents, all_documents, self.group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        all_documents: Tensor | None,
        group: Collective,
    ) -> Tensor:
        rows, (keys, values) = Rows(query), _whole(group, key, value)
        for tile in tiles_of_sequence(group.rank, size=group.size, length=query.shape[2]):
            rows.add(tile, keys, values, documents=_documents(documents, all_documents))
        ctx.group, out = group, rows.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, documents, all_documents, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, documents, all_documents, out, lse = ctx.saved_tensors
        group, rows = ctx.group, RowsBackward(grads[0], query, out=out, lse=lse)
        both = _whole(group, key, value)
        of_both = torch.zeros(both.shape, dtype=wide_dtype(both.dtype), device=both.device)
        with torch.autocast(query.device.type, enabled=False):
            for tile in tiles_of_sequence(group.rank, size=group.size, length=query.shape[2]):
                rows.add(
                    tile, both[0], both[1], documents=_documents(documents, all_documents),
                    grad_key=of_both[0], grad_value=of_both[1],
                )  # fmt: skip
        own = _own_sum(group, of_both)
        return (rows.grad_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), None, None, None)


def _whole(group: Collective, key: Tensor, value: Tensor) -> Tensor:
    """`[2, batch, kv_heads, seq, head_size]`: the keys and the values of the whole sequence, in its order."""
    return in_sequence(gathered(group, torch.stack((key, value))), dim=SEQUENCE)


def _own_sum(group: Collective, whole: Tensor) -> Tensor:
    """This rank's part of the sum of all ranks' `whole`; the adjoint of `_whole`."""
    parts = by_rank(whole, size=group.size, dim=SEQUENCE)
    own = torch.empty_like(parts[0])
    group.reduce_scatter(own, parts.flatten(0, 1)).wait()
    return own


def _documents(documents: Tensor | None, all_documents: Tensor | None) -> Documents | None:
    return None if documents is None or all_documents is None else Documents(documents, all_documents)
