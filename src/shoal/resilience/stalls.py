"""Hung ranks: alive by their heartbeat, without progress, and others wait for them.

When one rank of a lock-step group hangs, the others soon stand still, too, in the collective that they wait in. So a
rank hangs that has stood still for `limit_s` *outside* of a collective, while another has stood still for as long
*inside* of one. Long steps are no hang: there nobody waits, or not for so long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Doing = Literal["", "computes", "waits"]
"""What a rank does: it takes no steps of a generation; it does, outside of a collective; it waits in one."""


class Activity(NamedTuple):
    """A rank within a generation. `calls` counts its collectives, `doing` is what it does now."""

    calls: int
    doing: Doing


Rank = tuple[str, int]
"""A replica, and the number of one of its ranks."""


@dataclass
class Stalls:
    """`limit_s`: how long a rank may keep others waiting; 0: for ever."""

    limit_s: float
    last: dict[Rank, tuple[int, Doing]] = field(default_factory=dict)
    since_s: dict[Rank, float] = field(default_factory=dict)

    def heard(self, rank: Rank, progress: int, doing: Doing, now_s: float) -> None:
        """A heartbeat of `rank`, with the count of what it has done."""
        if self.last.get(rank) != (progress, doing):
            self.last[rank], self.since_s[rank] = (progress, doing), now_s

    def forget(self, rank: Rank) -> None:
        """A rank that has gone."""
        self.last.pop(rank, None)
        self.since_s.pop(rank, None)

    def hung(self, now_s: float, *, others_wait: bool = False) -> list[Rank]:
        """Those that hang; `others_wait`: it is known otherwise that some have waited for `limit_s`."""
        if not self.limit_s:
            return []
        still = [rank for rank, since_s in self.since_s.items() if now_s - since_s > self.limit_s]
        if not others_wait and not any(self.last[rank][1] == "waits" for rank in still):
            return []
        return [rank for rank in still if self.last[rank][1] == "computes"]
