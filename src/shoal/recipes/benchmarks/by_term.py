"""Single-node steps without a pipeline, taken apart: what of a wrong prediction is the layer's, the head's, the step's.

For one hidden size, tensor size and microbatch, a step of m microbatches and L layers on d data-parallel ranks is

    T = a + m b + m L c + L u + L e 2(d-1)/d

a and u: optimizer, by step and layer; b: head and embedding; c: one layer, forward to backward; e: sums of gradients.
Least squares over vTrain's rows leave 0.1 %: measurements hardly scatter, so that what is wrong is the prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.recipes.benchmarks.scored import Scored

TERMS = ("step", "microbatch", "layer", "layer once", "gradients")
MILLI = 1e3


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The five terms of one kind of row, ms, by name; `scatter`: root mean square of what they leave, relative."""

    hidden: int
    tensor: int
    microbatch: int
    rows: int
    measured: dict[str, float]
    predicted: dict[str, float]
    scatter: float


def by_term(rows: Iterable[Scored]) -> list[Terms]:
    """Every kind with enough different rows for five terms, smallest first."""
    kinds: dict[tuple[int, int, int], list[Scored]] = {}
    for one in rows:
        plan = one.row.plan
        if plan.layout.pipeline == 1:
            key = (one.row.workload.model.hidden, plan.layout.tensor, plan.microbatch)
            kinds.setdefault(key, []).append(one)
    found = (_terms(key, kinds[key]) for key in sorted(kinds) if len(kinds[key]) > len(TERMS))
    return [terms for terms in found if terms is not None]


def less_time_for_more(found: Sequence[Terms]) -> list[tuple[Terms, Terms]]:
    """(wider or larger, narrower or smaller) of the same tensor size, where the former's layer was measured faster.

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
    """None where the rows do not tell the terms apart."""
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
    """Least squares of relative errors: the terms in ms, and what they leave."""
    times = np.array(seconds)
    terms = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)[0]
    left = float(np.sqrt(np.mean((columns @ terms / times - 1) ** 2)))
    return {name: float(MILLI * value) for name, value in zip(TERMS, terms, strict=True)}, left
