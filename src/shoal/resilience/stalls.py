"""Hung ranks: alive by their heartbeat, and without progress.

When one rank of a lock-step group hangs, all the others soon stand still, too, in the collective that they wait in. So
those are suspected that stand still with the *least* progress: they have not reached what the others wait for.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class Stalls:
    """`limit_s`: how long a rank may make no progress; more than the longest step, save or evaluation."""

    limit_s: float
    progress: dict[Hashable, int] = field(default_factory=dict)
    since_s: dict[Hashable, float] = field(default_factory=dict)

    def heard(self, rank: Hashable, progress: int, now_s: float) -> None:
        """A heartbeat of `rank`, with the count of what it has done."""
        if self.progress.get(rank) != progress:
            self.progress[rank], self.since_s[rank] = progress, now_s

    def forget(self, rank: Hashable) -> None:
        """A rank that has gone."""
        self.progress.pop(rank, None)
        self.since_s.pop(rank, None)

    def suspects(self, now_s: float) -> list[Hashable]:
        """Those that hang; nobody where one that is behind still moves, or where all have made the same progress:
        then `hang_verdict` has to say."""
        still = [rank for rank, since_s in self.since_s.items() if now_s - since_s > self.limit_s]
        if not still:
            return []
        least = min(self.progress[rank] for rank in still)
        if min(self.progress.values()) < least or max(self.progress.values()) == least:
            return []
        return [rank for rank in still if self.progress[rank] == least]
