"""Ring attention (Liu, Zaharia and Abbeel, arXiv:2310.01889), balanced for the causal mask.

Keys and values travel round the ring while each rank computes with those that it has; what comes out is merged by the
log-sum-exp. In the backward they travel again, and their gradients one step behind them: the sum of a block begins at
the rank after its home, gains a term at every rank, and is home after size - 1 steps. Only this rank's slices and its
log-sum-exp are kept in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective, Handle
from shoal.parallel.context.core import ContextCore, gathered
from shoal.parallel.context.tiles import Documents, Rows, RowsBackward, tiles_of_source, wide_dtype

BLOCKS, GRADIENTS = 0, 1
"""Tags of the two things that travel."""


class RingAttention(ContextCore):
    """`ContextCore` by a ring."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        everyones = None if documents is None else gathered(self.group, documents)
        return _Ring.apply(query, key, value, everyones, self.group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, everyones: Tensor | None, group: Collective
    ) -> Tensor:
        rows, block = Rows(query), torch.stack((key, value))
        for source in _sources(group):
            coming = None if source == _last(group) else shift(group, block, tag=BLOCKS)
            documents = _ring_documents(everyones, group.rank, source)
            for tile in tiles_of_source(group.rank, source, length=query.shape[2]):
                rows.add(tile, block[0], block[1], documents=documents)
            block = block if coming is None else coming.wait()
        ctx.group, out = group, rows.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, everyones, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, everyones, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            rows = RowsBackward(grads[0], query, out=out, lse=lse)
            of_block = _block_gradient(rows, torch.stack((key, value)), everyones, group=ctx.group)
        return rows.grad_query.to(query.dtype), of_block[0].to(key.dtype), of_block[1].to(value.dtype), None, None


def _block_gradient(rows: RowsBackward, block: Tensor, everyones: Tensor | None, *, group: Collective) -> Tensor:
    """The gradient of this rank's `block` of keys and values, all ranks' terms; adds to `rows` on the way."""
    own = torch.zeros(block.shape, dtype=wide_dtype(block.dtype), device=block.device)
    travelling = None
    for source in _sources(group):
        coming = None if source == _last(group) else shift(group, block, tag=BLOCKS)
        terms = own if source == group.rank else torch.zeros_like(own)
        documents = _ring_documents(everyones, group.rank, source)
        for tile in tiles_of_source(group.rank, source, length=rows.query.shape[2]):
            rows.add(tile, block[0], block[1], documents=documents, grad_key=terms[0], grad_value=terms[1])
        if source != group.rank:
            if travelling is not None:
                terms += travelling.wait()
            travelling = shift(group, terms, tag=GRADIENTS)
        block = block if coming is None else coming.wait()
    return own if travelling is None else own + travelling.wait()


def _sources(group: Collective) -> list[int]:
    """Whose block is here, step by step."""
    return [(group.rank - step) % group.size for step in range(group.size)]


def _last(group: Collective) -> int:
    return _sources(group)[-1]


def _ring_documents(everyones: Tensor | None, rank: int, source: int) -> Documents | None:
    return None if everyones is None else Documents(everyones[rank], everyones[source])


@dataclass(frozen=True)
class Shift:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    leaving: Tensor  # kept until it has left
    arriving: Tensor
    handles: tuple[Handle, Handle]

    def wait(self) -> Tensor:
        """What has arrived."""
        for handle in self.handles:
            handle.wait()
        return self.arriving


def shift(group: Collective, tensor: Tensor, *, tag: int) -> Shift:
    """Begins to send `tensor`, contiguous and not to be written until `wait`, to the next rank of the ring.

    Even ranks call send first and odd ranks receive first: a backend that runs the calls of a pair in their order, as
    NCCL does, would stand still if both began with the same.
    """
    arriving = torch.empty_like(tensor)
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank % 2 == 0:
        sent = group.send(tensor, to=to, tag=tag)
        return Shift(tensor, arriving, (sent, group.recv(arriving, source=source, tag=tag)))
    received = group.recv(arriving, source=source, tag=tag)
    return Shift(tensor, arriving, (received, group.send(tensor, to=to, tag=tag)))
