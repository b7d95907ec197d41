"""Where parameters lie in one flat buffer that is cut evenly over ranks. Pure.

    buffer   | w0 ..... | w1 .. | w2 ........... | padding |
    pieces   | rank 0      | rank 1      | rank 2          |

All pieces are equally long, so that one reduce-scatter sums gradients and one all-gather brings parameters back. A
piece may begin within a parameter, and hold several; a rank whose piece is all padding owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm.buckets.summed import ALIGNMENT, aligned


@dataclass(frozen=True)
class Run:
    """The elements `start` .. `stop` of a parameter, which lie in a piece from `at` on."""

    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """`lengths` of the parameters and where each begins; `piece` elements for each of `ranks`."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    piece: int
    ranks: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.piece * self.ranks

    def slice(self, number: int) -> slice:
        """Where parameter `number` lies in the buffer."""
        return slice(self.starts[number], self.starts[number] + self.lengths[number])

    def mine(self, rank: int) -> slice:
        """Where the piece of `rank` lies in the buffer."""
        return slice(self.piece * rank, self.piece * (rank + 1))

    def run(self, number: int, rank: int) -> Run | None:
        """What of parameter `number` lies in the piece of `rank`; None where nothing does."""
        whole, mine = self.slice(number), self.mine(rank)
        start, stop = max(whole.start, mine.start), min(whole.stop, mine.stop)
        return Run(start - whole.start, stop - whole.start, start - mine.start) if start < stop else None

    @property
    def gaps(self) -> list[slice]:
        """What belongs to no parameter."""
        ends = [0, *(self.slice(number).stop for number in range(len(self.lengths)))]
        begins = [*self.starts, self.numel]
        return [slice(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]


def flat_layout(lengths: Sequence[int], ranks: int) -> FlatLayout:
    """The layout of parameters of these lengths, in this order."""
    starts, end = aligned(lengths)
    lines = -(-end // ALIGNMENT)
    return FlatLayout(tuple(lengths), tuple(starts), -(-lines // ranks) * ALIGNMENT, ranks)
