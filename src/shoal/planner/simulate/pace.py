"""How long devices take compared with what they should: stragglers as distributions, deterministic by seed.

A device is slow for the whole run with probability `slow_share`, then everything takes `slow_factor` times as long;
beside that every action of every device takes exp(sigma Z) times as long, Z standard normal (lognormal noise with
median 1). Peers that wait for each other in every layer (tensor and context ranks) move as the slowest of them: their
factors fold into one by a maximum, exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """A distribution of factors; all defaults: every device takes what it should. `slow` names devices of which it is
    known, as {(replica, pipeline rank, peer): factor}."""

    slow_share: float = 0.0
    slow_factor: float = 1.0
    sigma: float = 0.0
    seed: int = 0
    slow: Mapping[tuple[int, int, int], float] = field(default_factory=dict)

    @property
    def even(self) -> bool:
        """Whether all devices always do the same, so that replicas can be folded."""
        return not self.sigma and not self.slow and (not self.slow_share or self.slow_factor == 1)

    def factors(self, replica: int, rank: int, peer: int, *, actions: int) -> list[float]:
        """One device's factors of its first `actions` actions."""
        own = random.Random(f"{self.seed}/{replica}/{rank}/{peer}")
        whole = self.slow_factor if own.random() < self.slow_share else 1.0
        whole *= self.slow.get((replica, rank, peer), 1.0)
        if not self.sigma:
            return [whole] * actions
        return [whole * math.exp(self.sigma * own.gauss(0, 1)) for _ in range(actions)]

    def slowest(self, replica: int, rank: int, peers: range, *, actions: int) -> list[float]:
        """The factors of peers in lock-step: in each action, the largest."""
        rows = [self.factors(replica, rank, peer, actions=actions) for peer in peers]
        return [max(column) for column in zip(*rows, strict=True)]
