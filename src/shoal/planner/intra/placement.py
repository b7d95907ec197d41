"""How a tensor lies over the ranks of one axis, and what it costs to lay it another way, forward and backward.

    whole      every rank has it; so has it its gradient
    shared     every rank has it; of its gradient each rank has one term of a sum
    partial    each rank has one term of a sum; every rank has its gradient
    split d    each rank has a part along dimension d, and that part of its gradient

A value and its gradient are moved separately: the value from where it is made to where it is used, the gradient back.

    move(term -> whole) = all-reduce      move(term -> part)  = reduce-scatter     move(part -> whole) = all-gather
    move(part -> other part) = all-to-all of a rank's share                        everything else is free

so that cost(x -> y) = move(value of x -> value of y) + move(gradient of y -> gradient of x). They are the layouts and
conversions of Alpa's intra-operator plans (arXiv:2201.12023, section 4.1), sums of gradients included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.cost.wire import Links

Kind = Literal["whole", "shared", "partial", "split"]
State = Literal["all", "term"] | int
"""What a rank has of a value: all of it, one term of a sum, or a part along a dimension."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`dim` where it is split, counted from 0."""

    kind: Kind
    dim: int = -1

    @property
    def value(self) -> State:
        """What a rank has of the tensor."""
        if self.kind == "split":
            return self.dim
        return "term" if self.kind == "partial" else "all"

    @property
    def gradient(self) -> State:
        """What a rank has of its gradient."""
        if self.kind == "split":
            return self.dim
        return "term" if self.kind == "shared" else "all"

    def __str__(self) -> str:
        return f"split {self.dim}" if self.kind == "split" else self.kind


WHOLE, SHARED, PARTIAL = Placement("whole"), Placement("shared"), Placement("partial")


def split(dim: int) -> Placement:
    """Each rank has a part along `dim`."""
    return Placement("split", dim)


def conversion_s(made: Placement, used: Placement, size: float, links: Links) -> float:
    """Seconds to bring `size` bytes from where they are made to where they are used, and their gradient back."""
    return _move_s(made.value, used.value, size, links) + _move_s(used.gradient, made.gradient, size, links)


def _move_s(there: State, wanted: State, size: float, links: Links) -> float:
    if there == wanted or there == "all" or wanted == "term":
        return 0.0
    if there == "term":
        return links.all_reduce(size) if wanted == "all" else links.all_gather(size)
    return links.all_gather(size) if wanted == "all" else links.all_to_all(size / links.ranks)
