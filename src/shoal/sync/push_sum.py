"""Push-sum: the average of what many hold, by shares that are sent one way (Kempe, Dobra, Gehrke, FOCS 2003).

Every node holds a vector x and a weight w, at first 1. To push, it divides both alike: a fraction of each goes to every
receiver, the rest stays. What arrives is added. The sums of x and of w over all nodes and all shares on their way never
change, so that every

    z = x / w

tends to the average, although nodes that receive more than they send hold more than others. A share that comes late is
only late. One that is lost must be sent again, and one that comes twice counts once: shares are numbered.

A pure state machine: who sends when is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Share(NamedTuple):
    """What `source` sends to one receiver: a part of x, and of the weight. It is number `number` of those to it."""

    source: int
    number: int
    x: Sequence[Tensor]
    weight: float


@dataclass
class PushSum:
    """Node `rank`. `x` are its tensors, of floating point; they are written in place."""

    rank: int
    x: Sequence[Tensor]
    weight: float = 1.0
    _sent: dict[int, int] = field(default_factory=dict)
    _received: dict[int, _Numbers] = field(default_factory=dict)

    def push(self, fractions: Mapping[int, float]) -> dict[int, Share]:
        """The shares for the receivers in `fractions`; this node keeps the rest of 1.

        Raises `ValueError` if fractions are negative or nothing would be kept.
        """
        kept = 1.0 - sum(fractions.values())
        if kept <= 0 or any(fraction < 0 for fraction in fractions.values()):
            raise ValueError(f"node {self.rank} was asked to send {dict(fractions)}: fractions must sum to less than 1")
        cut = {part: [x * part for x in self.x] for part in set(fractions.values())}
        shares = {to: Share(self.rank, self._next(to), cut[part], self.weight * part) for to, part in fractions.items()}
        for x in self.x:
            x.mul_(kept)
        self.weight *= kept
        return shares

    def receive(self, share: Share) -> bool:
        """Adds a share; False, and nothing is added, if it came before."""
        numbers = self._received.setdefault(share.source, _Numbers())
        if not numbers.add(share.number):
            return False
        for x, part in zip(self.x, share.x, strict=True):
            x.add_(part)
        self.weight += share.weight
        return True

    def z(self) -> list[Tensor]:
        """x / w, new tensors."""
        return [x / self.weight for x in self.x]

    def _next(self, to: int) -> int:
        number = self._sent.get(to, 0)
        self._sent[to] = number + 1
        return number


@dataclass
class _Numbers:
    """Numbers that have come: all below `below`, and those in `beyond`."""

    below: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, number: int) -> bool:
        """False if it has come before."""
        if number < self.below or number in self.beyond:
            return False
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        return True
