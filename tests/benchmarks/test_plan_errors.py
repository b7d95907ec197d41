"""Steps are taken apart into the terms that they were made of, and vTrain's rows leave next to nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.plan_errors import TERMS, Scored, by_term, less_time_for_more
from benchmarks.published import Row
from shoal.cost.plan import Plan
from shoal.topology.layout import Layout

PUBLISHED = Path(__file__).parents[1] / "planner" / "published"
SCATTER = 0.005  # of vTrain's rows about their own terms: 0.3 % at worst
MADE_MS = {"step": 3.0, "microbatch": 8.0, "layer": 2.0, "layer once": 0.5, "gradients": 0.2}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """vTrain's steps on one node."""
    return list(published.vtrain(PUBLISHED, file=published.VTRAIN_SINGLE, table="vTrain"))


def _made(row: Row, layers: int, ranks: int, microbatches: int) -> Scored:
    model = replace(row.workload.model, layers=layers)
    plan = Plan(layout=Layout(shard=ranks), microbatch=1, microbatches=microbatches)
    once = layers * (MADE_MS["layer once"] + MADE_MS["gradients"] * 2 * (ranks - 1) / ranks)
    each = MADE_MS["microbatch"] + layers * MADE_MS["layer"]
    seconds = 1e-3 * (MADE_MS["step"] + microbatches * each + once)
    made = replace(row, workload=replace(row.workload, model=model), plan=plan, measured_s=seconds)
    return Scored(row=made, predicted_s=2 * seconds, calibrated=False)


def test_the_terms_of_made_up_steps_are_found(rows: list[Row]) -> None:
    """Exactly, and of a prediction that is twice as long, twice as much."""
    made = [_made(rows[0], *sizes) for sizes in product((12, 16, 24), (2, 4, 8), (2, 4))]
    (found,) = by_term(made)
    assert found.measured == pytest.approx(MADE_MS)
    assert found.predicted == pytest.approx({name: 2 * MADE_MS[name] for name in TERMS})
    assert found.scatter < 1e-9


def test_rows_that_do_not_tell_the_terms_apart_have_none(rows: list[Row]) -> None:
    """One number of ranks cannot tell gradients from the optimizer."""
    made = [_made(rows[0], layers, 2, count) for layers, count in product((12, 16, 24), (2, 4, 8))]
    assert by_term(made) == []


def test_published_steps_are_made_of_these_terms(rows: list[Row]) -> None:
    """Every kind of row to half a percent; and some layers took less time for more work."""
    found = by_term(Scored(row=row, predicted_s=row.measured_s, calibrated=False) for row in rows)
    assert len(found) > 10
    assert max(one.scatter for one in found) < SCATTER
    inversions = less_time_for_more(found)
    assert inversions
    assert all(more.measured["layer"] < less.measured["layer"] for more, less in inversions)
