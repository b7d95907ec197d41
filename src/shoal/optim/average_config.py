"""The tables `[optimizer.average]` and `[optimizer.lookahead]`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from shoal.config.table import Positive, Table, says


class EMA(Table, frozen=True, tag_field="kind", tag="ema"):
    """An exponential average of the weights, beside them: evaluations and exports are of it."""

    decay: Annotated[float, says("The share of the average that an update leaves.", ge=0, lt=1)] = 0.999


class SWA(Table, frozen=True, tag_field="kind", tag="swa"):
    """The mean of weights at intervals (arXiv:1803.05407), beside them: evaluations and exports are of it."""

    start: Annotated[Positive, says("The first update whose weights count; until then the mean is the weights.")]
    every: Annotated[Positive, says("Updates between two that count.")] = 1


AverageConfig = EMA | SWA


class Lookahead(Table, frozen=True):
    """Lookahead (arXiv:1907.08610): now and then weights go back towards where they were."""

    every: Annotated[Positive, says("Updates until they do.")] = 5
    share: Annotated[float, says("The share of the way that is kept.", gt=0, le=1)] = 0.5
