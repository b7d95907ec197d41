"""All-reduce in two shots through shared memory.

A tensor goes through in pieces x_0, x_1, ... of bounded size; each piece has one part for every rank:

    bring    every rank copies its piece into its own segment, but for its own part
    reduce   rank r writes the sum of part r over all ranks, in rank order, into its segment and its piece
    take     every rank copies the other parts of the sum, part q from the segment of rank q

Between two of these steps all ranks meet. Rank order makes the result the same bits on every rank and in every run.
Per piece of S bytes a rank reads (3 - 1/n) S and writes 2 S, where n is the number of ranks.
(Reduce-scatter and all-gather: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4.5; memory for messages.)

Note: one meeting a piece
-------------------------
Piece k is reduced while k+1 is brought and k-1 is taken, so that one meeting serves three pieces. A segment therefore
has three places, used in turn: what is written in a stage is in no place that others read in the same stage. The turn
goes on from call to call, hence nobody need meet at the end of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Reduction

PLACES = 3
SEGMENT_BYTES = PLACES * (4 << 20)

_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_SHORT = (torch.float16, torch.bfloat16)


class TwoShot:
    """One rank's side of all-reduces. `segments[q]` is that of rank q: uint8, of one size that PLACES * 8 divides."""

    def __init__(self, segments: Sequence[Tensor], rank: int, meet: Callable[[], None]) -> None:
        self._places = [segment.chunk(PLACES) for segment in segments]
        self._piece_bytes = len(self._places[0][0])
        self._rank, self._size, self._meet = rank, len(segments), meet
        self._turn = 0

    def all_reduce(self, flat: Tensor, op: Reduction) -> None:
        """`flat` [numel], contiguous, becomes the reduction over all ranks. Raises what `meet` raises."""
        pieces = flat.split(self._piece_bytes // flat.element_size())
        turn, count = self._turn, len(pieces)
        self._turn += count
        for stage in range(count + 2):
            if stage >= 2:
                self._take(pieces[stage - 2], turn + stage - 2)
            if 1 <= stage <= count:
                self._reduce(pieces[stage - 1], turn + stage - 1, op)
            if stage < count:
                self._bring(pieces[stage], turn + stage)
            if stage <= count:
                self._meet()

    def _bring(self, piece: Tensor, turn: int) -> None:
        place, own = self._place(self._rank, turn, piece), self._part(piece, self._rank)
        for part in (slice(0, own.start), slice(own.stop, len(piece))):
            place[part].copy_(piece[part])

    def _reduce(self, piece: Tensor, turn: int, op: Reduction) -> None:
        part = self._part(piece, self._rank)
        brought = [self._place(rank, turn, piece)[part] for rank in range(self._size)]
        total = brought[self._rank]
        brought[self._rank] = piece[part]
        combine(brought, op, out=total)
        piece[part].copy_(total)  # now, while it is in this core's cache

    def _take(self, piece: Tensor, turn: int) -> None:
        for rank in (*range(self._rank), *range(self._rank + 1, self._size)):
            part = self._part(piece, rank)
            piece[part].copy_(self._place(rank, turn, piece)[part])

    def _place(self, rank: int, turn: int, piece: Tensor) -> Tensor:
        return self._places[rank][turn % PLACES].view(piece.dtype)[: len(piece)]

    def _part(self, piece: Tensor, rank: int) -> slice:
        return slice(len(piece) * rank // self._size, len(piece) * (rank + 1) // self._size)


def combine(tensors: Sequence[Tensor], op: Reduction, *, out: Tensor) -> None:
    """Two tensors or more, of one shape, from left to right. Sums of 16-bit floats are rounded once, at the end."""
    if op == "sum" and out.dtype in _SHORT:
        total = tensors[0].float()
        for tensor in tensors[1:]:
            total.add_(tensor)
        out.copy_(total)
        return
    left = tensors[0]
    for right in tensors[1:]:
        left = _COMBINE[op](left, right, out=out)
