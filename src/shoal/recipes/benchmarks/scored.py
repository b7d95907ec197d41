"""Published rows with their predictions: the error of each, and the regret of choosing by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.planner.predict.bill import Constants
from shoal.recipes.benchmarks.published import Row


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row with its prediction. `calibrated` is true of the one row of its machine type that gave a constant."""

    row: Row
    predicted_s: float
    calibrated: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.row.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine type: its rows, its calibrated constants, the row that gave them."""

    name: str
    rows: tuple[Row, ...]
    constants: Constants
    calibrated_on: str


def regrets(rows: Sequence[Scored], *, tried: int = 1) -> list[tuple[str, float]]:
    """(group, regret) of every group of at least two choices.

    Chosen is what was measured to be the fastest of the `tried` that are predicted to be.
    """
    groups: dict[str, list[Scored]] = {}
    for one in rows:
        groups.setdefault(f"{one.row.table}: {one.row.group}", []).append(one)
    found = []
    for name, choices in groups.items():
        if len(choices) > 1:
            candidates = sorted(choices, key=lambda one: one.predicted_s)[:tried]
            chosen_s, best_s = (min(one.row.measured_s for one in some) for some in (candidates, choices))
            found.append((name, chosen_s / best_s - 1))
    return found
