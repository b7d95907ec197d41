"""The load of every expert over the steps of a run, read from the events of the ranks that recorded it.

moe/load/<mixture>/<expert>     tokens that chose this expert in a step, over all ranks
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.observe.events import Event

_NAME = re.compile(r"moe/load/(.{1,200})/(\d{1,4})")


@dataclass(frozen=True)
class LayerLoads:
    """Of one mixture: `tokens[i][expert]` in step `steps[i]`."""

    name: str
    steps: Sequence[int]
    tokens: Sequence[Sequence[float]]

    @property
    def experts(self) -> int:
        """How many experts it has."""
        return len(self.tokens[0])

    @property
    def totals(self) -> list[float]:
        """Tokens of each expert over all recorded steps."""
        return [math.fsum(column) for column in zip(*self.tokens, strict=True)]

    @property
    def imbalance(self) -> float:
        """The largest of `totals` over their mean: 1 where all are loaded alike."""
        totals = self.totals
        return max(totals) * len(totals) / math.fsum(totals)

    @property
    def step_imbalance(self) -> float:
        """What the fullest expert of a step gets over that step's mean, in the median of the steps.

        A step waits for its fullest expert, whichever it is; `imbalance` is 1 where each is the fullest in its turn.
        """
        return statistics.median(max(row) * len(row) / math.fsum(row) for row in self.tokens)


def mean_imbalance(layers: Sequence[LayerLoads]) -> float:
    """The mean `step_imbalance` of the mixtures of a run: their times add up. 1 without any."""
    return statistics.fmean(layer.step_imbalance for layer in layers) if layers else 1.0


def layer_loads(events: Iterable[Event]) -> list[LayerLoads]:
    """The mixtures that a rank recorded, in order.

    Where a step was computed again, the later attempt counts; steps whose record is not whole are left out.
    """
    kept: list[tuple[int, dict[str, dict[int, float]]]] = []
    for event in events:
        found = _found(event)
        while kept and (kept[-1][0] > event.step or (kept[-1][0] == event.step and found)):
            kept.pop()
        if found:
            kept.append((event.step, found))
    return [layer for name in dict.fromkeys(n for _, found in kept for n in found) if (layer := _layer(name, kept))]


def _found(event: Event) -> dict[str, dict[int, float]]:
    """Tokens by mixture and expert."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for key, value in event.values.items():
        if key.startswith("moe/load/") and value is not None and (match := _NAME.fullmatch(key)):
            found[match[1]][int(match[2])] = value
    return found


def _layer(name: str, kept: Sequence[tuple[int, dict[str, dict[int, float]]]]) -> LayerLoads | None:
    rows = [(step, found[name]) for step, found in kept if name in found]
    experts = max(len(row) for _, row in rows)
    whole = [(step, [row[e] for e in range(experts)]) for step, row in rows if row.keys() == set(range(experts))]
    whole = [(step, row) for step, row in whole if min(row) >= 0 and 0 < math.fsum(row) < math.inf]
    return LayerLoads(name, [step for step, _ in whole], [row for _, row in whole]) if whole else None
