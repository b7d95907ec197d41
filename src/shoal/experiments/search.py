"""Which configurations are tried, and which are stopped early. Pure: the same file gives the same trials.

Bayesian search proposes its configurations while the sweep runs (`bayes`); the others are known before it starts.

Asynchronous successive halving (Li et al., arXiv:1810.05934): a trial is judged at the rungs

    first_steps * factor^k,    k = 0, 1, ...

and stands still at a rung as long as its value is not among the best 1/factor of those that have been seen there so
far. Nobody waits for others: the first trials to reach a rung go on, and one that stands still goes on when it is among
the best of more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from shoal.experiments.config import ASHA, Bayes, Random, Range, SweepFile


@dataclass(frozen=True)
class Trial:
    """One run of the sweep: a configuration and a seed."""

    number: int
    configuration: int
    parameters: Mapping[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """The name of its run and of its folder."""
        return f"trial-{self.number:04d}"


def trials(sweep: SweepFile, proposed: Sequence[Mapping[str, Any]] = ()) -> list[Trial]:
    """Every trial, the configurations in order and their seeds side by side; of a `Bayes` search, those `proposed`."""
    configurations = proposed if isinstance(sweep.search, Bayes) else _configurations(sweep)
    pairs = [(index, seed) for index in range(len(configurations)) for seed in sweep.seeds]
    return [Trial(number, index, configurations[index], seed) for number, (index, seed) in enumerate(pairs)]


def rungs(search: ASHA, steps: int) -> list[int]:
    """The steps at which trials of `steps` steps are judged; the last step is no rung."""
    found, rung = [], search.first_steps
    while rung < steps:
        found.append(rung)
        rung *= search.factor
    return found


def goes_on(value: float, seen: Sequence[float], *, factor: int, minimize: bool) -> bool:
    """Whether a trial with `value` at a rung is among the best 1/`factor` of `seen`, its own value included.

    A value that is not finite never goes on, and counts as the worst for the others.
    """
    if not math.isfinite(value):
        return False
    better = sum((other < value if minimize else other > value) for other in seen if math.isfinite(other))
    return better < max(1, len(seen) // factor)


def _configurations(sweep: SweepFile) -> list[dict[str, Any]]:
    search = sweep.search
    count = search.trials if isinstance(search, Random | ASHA) else None
    if count is None:
        return [dict(zip(sweep.parameters, values, strict=True)) for values in product(*_lists(sweep))]
    draw = random.Random(search.seed if isinstance(search, Random | ASHA) else 0)
    return [{key: _drawn(values, draw) for key, values in sweep.parameters.items()} for _ in range(count)]


def _lists(sweep: SweepFile) -> list[list[Any]]:
    return [values for values in sweep.parameters.values() if isinstance(values, list)]


def _drawn(values: list[Any] | Range, draw: random.Random) -> Any:
    if isinstance(values, list):
        return draw.choice(values)
    if values.log:
        value = math.exp(draw.uniform(math.log(values.low), math.log(values.high)))
    else:
        value = draw.uniform(values.low, values.high)
    return round(value) if values.whole else float(f"{value:.6g}")
