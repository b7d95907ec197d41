"""Who takes part in a round: a pure function of the seed, the round, the attempt and who is there.

uniform    the first of a random order
by size    without replacement, in proportion to sizes: the largest of u_i^(1 / size_i), u_i uniform
           (Efraimidis, Spirakis, Information Processing Letters 97, 2006)
Poisson    each client by itself with chance q: what the accountants of differential privacy assume
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from shoal.federated.config import FederatedConfig
from shoal.maths.counter import key_of, uniform


def choose(
    config: FederatedConfig, present: Mapping[str, int], *, seed: int, round: int, attempt: int = 0
) -> list[str]:
    """The clients of a round among those that are `present` (their samples by name), at most the cohort and what
    `over_selection` adds, sorted by name."""
    names = sorted(present)
    wanted = math.ceil(config.cohort_size * (1 + config.over_selection))
    if len(names) <= wanted:
        return names
    drawn = _uniform(names, seed, "cohort", round, attempt)
    if config.sampling == "by_size":
        sizes = torch.tensor([max(1, present[name]) for name in names], dtype=torch.float64)
        drawn = -(drawn.log() / sizes)
    first = drawn.sort(stable=True).indices[:wanted].tolist()
    return sorted(names[index] for index in first)


def choose_each(chance: float, present: Sequence[str], *, seed: int, round: int, attempt: int = 0) -> list[str]:
    """The clients of a round, each taken by itself with `chance`, sorted by name. There may be none."""
    names = sorted(present)
    drawn = _uniform(names, seed, "poisson", round, attempt)
    return [name for name, number in zip(names, drawn.tolist(), strict=True) if number < chance]


def _uniform(names: Sequence[str], seed: int, purpose: str, round: int, attempt: int) -> torch.Tensor:
    """A number in (0, 1) for each name, which does not depend on who else is there."""
    keys = torch.tensor([key_of(seed, purpose, round, attempt, name) for name in names], dtype=torch.int64)
    return uniform(keys, torch.zeros(len(names), dtype=torch.int64), dtype=torch.float64)
