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
from shoal.comm.messages import Messages
from shoal.parallel.context.core import ContextCore, gathered
from shoal.parallel.context.tiles import Documents, Rows, RowsBackward, tiles_of_source, wide_dtype

BLOCKS, GRADIENTS = 0, 1
"""Tags of the two things that travel."""


class RingAttention(ContextCore):
    """`ContextCore` by a ring."""

    def __init__(self, group: Collective, messages: Messages | None = None) -> None:
        super().__init__(group)
        self._ring = Ring(group, messages)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        everyones = None if documents is None else gathered(self.group, documents)
        return _Ring.apply(query, key, value, everyones, self._ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, everyones: Tensor | None, ring: Ring) -> Tensor:
        rows, block = Rows(query), torch.stack((key, value))
        for source in _sources(ring):
            coming = None if source == _last(ring) else ring.shift(block, tag=BLOCKS)
            documents = _ring_documents(everyones, ring.rank, source)
            for tile in tiles_of_source(ring.rank, source, length=query.shape[2]):
                rows.add(tile, block[0], block[1], documents=documents)
            block = block if coming is None else coming.wait()
        ctx.ring, out = ring, rows.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, everyones, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, everyones, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            rows = RowsBackward(grads[0], query, out=out, lse=lse)
            of_block = _block_gradient(rows, torch.stack((key, value)), everyones, ctx.ring)
        return rows.grad_query.to(query.dtype), of_block[0].to(key.dtype), of_block[1].to(value.dtype), None, None


def _block_gradient(rows: RowsBackward, block: Tensor, everyones: Tensor | None, ring: Ring) -> Tensor:
    """The gradient of this rank's `block` of keys and values, all ranks' terms; adds to `rows` on the way."""
    own = torch.zeros(block.shape, dtype=wide_dtype(block.dtype), device=block.device)
    travelling = None
    for source in _sources(ring):
        coming = None if source == _last(ring) else ring.shift(block, tag=BLOCKS)
        terms = own if source == ring.rank else torch.zeros_like(own)
        documents = _ring_documents(everyones, ring.rank, source)
        for tile in tiles_of_source(ring.rank, source, length=rows.query.shape[2]):
            rows.add(tile, block[0], block[1], documents=documents, grad_key=terms[0], grad_value=terms[1])
        if source != ring.rank:
            if travelling is not None:
                terms += travelling.wait()
            travelling = ring.shift(terms, tag=GRADIENTS)
        block = block if coming is None else coming.wait()
    return own if travelling is None else own + travelling.wait()


def _sources(ring: Ring) -> list[int]:
    """Whose block is here, step by step."""
    return [(ring.rank - step) % ring.size for step in range(ring.size)]


def _last(ring: Ring) -> int:
    return _sources(ring)[-1]


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


@dataclass(frozen=True)
class Ring:
    """The ranks of `group`, each of which sends to the next. `messages`: over what, None: over the group."""

    group: Collective
    messages: Messages | None = None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def shift(self, tensor: Tensor, *, tag: int) -> Shift:
        """Begins to send `tensor`, contiguous and not to be written until `wait`, to the next rank of the ring.

        Even ranks call send first and odd ranks receive first: a backend that runs the calls of a group in their order
        would stand still if all began with the same.
        """
        arriving, messages = torch.empty_like(tensor), self.messages or self.group
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.rank % 2 == 0:
            sent = messages.send(tensor, to=to, tag=tag)
            return Shift(tensor, arriving, (sent, messages.recv(arriving, source=source, tag=tag)))
        received = messages.recv(arriving, source=source, tag=tag)
        return Shift(tensor, arriving, (received, messages.send(tensor, to=to, tag=tag)))


def pairs_of_ring(size: int) -> list[tuple[int, int]]:
    """Sender and receiver of all that the ranks of a ring send."""
    return [(rank, (rank + 1) % size) for rank in range(size)]
