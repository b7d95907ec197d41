"""`Adasum`: an adaptive sum of what replicas changed (Maleki et al., arXiv:2006.02924, section 3).

    Adasum(a, b) = (1 - a b / 2 |a|^2) a + (1 - a b / 2 |b|^2) b

Changes at right angles are added, as steps that one replica would take after the other; equal ones are averaged. More
than two are taken in a tree of pairs, Adasum(Adasum(first half), Adasum(second half)), parameter by parameter.

Every rank gathers all changes of a parameter, and computes the same tree: n times one parameter of memory, and all
changes on the wire, n - 1 times the model. What has no length changes nothing, and nothing is divided by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import Segment


def adasum(changes: Sequence[Tensor]) -> Tensor:
    """Of one parameter: one tensor, of the shape and dtype of each. Inner products are computed in float64."""
    if len(changes) == 1:
        return changes[0]
    middle = len(changes) // 2
    a, b = adasum(changes[:middle]), adasum(changes[middle:])
    product, of_a, of_b = (float(torch.dot(x.flatten().double(), y.flatten().double())) for x, y in _pairs(a, b))
    return a * _share(product, of_a) + b * _share(product, of_b)


def _pairs(a: Tensor, b: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    return (a, b), (a, a), (b, b)


def _share(product: float, square: float) -> float:
    return 1.0 - product / (2 * square) if square > 0 else 1.0


class Adasum:
    """The adaptive sum over `group`, in place, of each of `segments` by itself. Sent once in a step."""

    by_microbatch: ClassVar[bool] = False

    def __init__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> None:
        self.group, self.result, self._segments = group, buffer, segments
        self._sent = False

    def start(self) -> None:
        self._sent = False

    def send(self, buffer: Tensor) -> None:
        self._sent = True

    def land(self) -> None:
        """The buffer is read when it is waited for."""

    def settle(self) -> None:
        """Nothing follows."""

    def wait(self) -> None:
        for segment in self._segments if self._sent and self.group.size > 1 else ():
            own = self.result[segment.slice]
            if own.numel():
                every = own.new_empty(self.group.size * own.numel())
                self.group.all_gather(every, own).wait()
                own.copy_(adasum(list(every.view(self.group.size, -1))))
        self._sent = False

    def commit(self) -> None:
        """Nothing is carried over."""
