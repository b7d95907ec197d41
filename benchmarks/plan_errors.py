"""Published rows with their predictions: the error of each, the regret of choosing by prediction, and errors by term.

Regret is how much slower the plan that the prediction would have chosen was measured than the best measured one.

Single-node steps without a pipeline are also taken apart, to see what is wrong in a wrong prediction. For one hidden
size, tensor size and microbatch, a step of m microbatches and L layers on d data-parallel ranks is

    T = a + m b + m L c + L u + L e 2(d-1)/d

a and u: optimizer, by step and by layer; b: head and embedding; c: forward and backward of one layer; e: gradient sums.
Least squares over vTrain's rows leave 0.1 %. Measurements hardly scatter, so what is wrong is the prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published import Row
from shoal.planner.predict.workload import Constants

TERMS = ("step", "microbatch", "layer", "layer once", "gradients")
MILLI = 1e3


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A row with its prediction. `calibrated`: whether the machine type's constants come from this row."""

    row: Row
    predicted_s: float
    calibrated: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.row.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine type: its rows, its calibrated constants, and the name of the row that they come from."""

    name: str
    rows: tuple[Row, ...]
    constants: Constants
    calibrated_on: str


def regrets(rows: Sequence[Scored], *, tried: int = 1) -> list[tuple[str, float]]:
    """(group, regret) of every group of at least two plans.

    The plan that counts as chosen is the fastest measured one among the `tried` plans that are predicted to be fastest.
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


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The five terms of one kind of row by name, ms. `scatter`: the root mean square of the relative residuals."""

    hidden: int
    tensor: int
    microbatch: int
    rows: int
    measured: dict[str, float]
    predicted: dict[str, float]
    scatter: float


def by_term(rows: Iterable[Scored]) -> list[Terms]:
    """The terms of every kind with enough different rows to determine five of them, smallest first."""
    kinds: dict[tuple[int, int, int], list[Scored]] = {}
    for one in rows:
        plan = one.row.plan
        if plan.layout.pipeline == 1:
            key = (one.row.workload.model.hidden, plan.layout.tensor, plan.microbatch)
            kinds.setdefault(key, []).append(one)
    found = (_terms(key, kinds[key]) for key in sorted(kinds) if len(kinds[key]) > len(TERMS))
    return [terms for terms in found if terms is not None]


def less_time_for_more(found: Sequence[Terms]) -> list[tuple[Terms, Terms]]:
    """(more, less) of the same tensor size: pairs in which the layer with more work was measured faster.

    No model in which more work takes longer can be right about both.
    """
    return [
        (more, less)
        for more in found
        for less in found
        if more.tensor == less.tensor
        and (more.hidden, more.microbatch) != (less.hidden, less.microbatch)
        and more.hidden >= less.hidden
        and more.microbatch >= less.microbatch
        and more.measured["layer"] < less.measured["layer"]
    ]


def _terms(key: tuple[int, int, int], rows: Sequence[Scored]) -> Terms | None:
    """None where the rows do not determine all terms."""
    columns = np.array([_columns(one) for one in rows])
    if np.linalg.matrix_rank(columns) < len(TERMS):
        return None
    measured, scatter = _fitted(columns, [one.row.measured_s for one in rows])
    predicted, _ = _fitted(columns, [one.predicted_s for one in rows])
    return Terms(
        hidden=key[0],
        tensor=key[1],
        microbatch=key[2],
        rows=len(rows),
        measured=measured,
        predicted=predicted,
        scatter=scatter,
    )


def _columns(one: Scored) -> list[float]:
    plan, layers = one.row.plan, one.row.workload.model.layers
    ranks = plan.data_parallel
    return [1, plan.microbatches, plan.microbatches * layers, layers, layers * 2 * (ranks - 1) / ranks]


def _fitted(columns: np.ndarray, seconds: Sequence[float]) -> tuple[dict[str, float], float]:
    """Least squares of relative errors: the terms in ms, and the scatter."""
    times = np.array(seconds)
    terms = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)[0]
    left = float(np.sqrt(np.mean((columns @ terms / times - 1) ** 2)))
    return {name: float(MILLI * value) for name, value in zip(TERMS, terms, strict=True)}, left
