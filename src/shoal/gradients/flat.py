"""Where tensors lie in one flat buffer that is divided evenly over ranks. Pure.

    buffer   | w0 ..... | w1 .. | w2 ........... | padding |
    pieces   | rank 0      | rank 1      | rank 2          |

All pieces are equally long, so that one reduce-scatter sums gradients and one all-gather brings parameters back. A
piece may begin inside a tensor and hold several; a rank whose piece is all padding owns nothing. An optimizer that has
scales for blocks of a tensor wants these whole, and the same on any number of ranks: tensors and pieces then start at a
multiple of `undivided`. One that works on whole matrices (Muon, Shampoo) needs each of them on one rank: `undivided` of
None packs tensors into pieces without cutting any,

    buffer   | w2 ........... | w0 ..... | w1 .. | padding |
    pieces   | rank 0         | rank 1                     |

largest first, each onto the rank with the least so far (Graham's LPT rule: the longest piece is at most 4/3 of the
best).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: tensors start on a cache line."""


@dataclass(frozen=True)
class ElementRun:
    """The elements `start` .. `stop` of a tensor, which lie in a piece from `at` on."""

    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """`lengths` of the tensors and where each begins; `piece` elements for each of `ranks`."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    piece: int
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.piece * self.ranks

    def slice(self, number: int) -> slice:
        """Where tensor `number` lies in the buffer."""
        return slice(self.starts[number], self.starts[number] + self.lengths[number])

    def mine(self, rank: int) -> slice:
        """Where the piece of `rank` lies in the buffer."""
        return slice(self.piece * rank, self.piece * (rank + 1))

    def run(self, number: int, rank: int) -> ElementRun | None:
        """What of tensor `number` lies in the piece of `rank`; None if nothing does."""
        whole, mine = self.slice(number), self.mine(rank)
        start, stop = max(whole.start, mine.start), min(whole.stop, mine.stop)
        return ElementRun(start - whole.start, stop - whole.start, start - mine.start) if start < stop else None

    @property
    def gaps(self) -> list[slice]:
        """What belongs to no tensor, ascending."""
        held = sorted((self.slice(number) for number in range(len(self.lengths))), key=lambda part: part.start)
        ends = [0, *(part.stop for part in held)]
        begins = [*(part.start for part in held), self.numel]
        return [slice(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def flat_layout(lengths: Sequence[int], ranks: int, *, undivided: int | None = ALIGNMENT) -> FlatLayout:
    """The layout of tensors of these lengths. `undivided`, a multiple of `ALIGNMENT`: so many numbers of a tensor, from
    its first on, stay on one rank; None: all of them.
    """
    if undivided is None:
        return _packed(lengths, ranks)
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // undivided) * undivided
    return FlatLayout(tuple(lengths), tuple(starts), -(-end // (ranks * undivided)) * undivided, ranks)


def share_of(length: int, rank: int, size: int) -> slice:
    """One rank's part of a buffer that all of `size` ranks hold whole, in whole cache lines."""
    lines = _lines(length)
    start, stop = (min(length, lines * r // size * ALIGNMENT) for r in (rank, rank + 1))
    return slice(start, stop)


def _packed(lengths: Sequence[int], ranks: int) -> FlatLayout:
    ends, places = [0] * ranks, [(0, 0)] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        rank = min(range(ranks), key=lambda rank: (ends[rank], rank))
        places[number] = (rank, ends[rank])
        ends[rank] += _lines(lengths[number]) * ALIGNMENT
    piece = max(ends)
    return FlatLayout(tuple(lengths), tuple(rank * piece + at for rank, at in places), piece, ranks)


def _lines(length: int) -> int:
    """Cache lines that hold `length` elements."""
    return -(-length // ALIGNMENT)
