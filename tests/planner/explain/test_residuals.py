"""Intervals and odds hold on rows that they were not taken from, and what is kept of published tables is theirs."""

from __future__ import annotations

import bisect
import itertools
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan import machines, scored
from benchmarks.plan_errors import Machine
from benchmarks.plan_evidence import Ratios, ratios_by_evidence
from benchmarks.zero_bubble import peak_memory
from shoal.planner.explain.residuals import (
    PUBLISHED_MEMORY,
    PUBLISHED_TIME,
    Evidence,
    Residuals,
)

PUBLISHED = Path(__file__).parent.parent / "published"
STALE = 0.01  # a model that moved a quantile by more has to have its quantiles written down anew
COVERAGE = 0.08  # of half of the rows by the other half: two standard errors
ROUNDING = 1e-12
UNSEEN = 0.08  # of 18 tables, some of three rows


def quantiles(ratios: Sequence[float], steps: int = 20) -> tuple[float, ...]:
    """The ratios at 0, 1/steps, .., 1, to three decimals: what is kept of a long table."""
    whole = Residuals.of(ratios, "")
    return tuple(round(whole.quantile(step / steps), 3) for step in range(steps + 1))


def quantiles_of_tables(tables: Iterable[Sequence[float]], steps: int = 20) -> tuple[float, ...]:
    """The same of several tables together. A row of a table of n weighs 1/sqrt(n), so that no table drowns the rest."""
    weighed = sorted((ratio, len(ratios) ** -0.5) for ratios in tables for ratio in ratios)
    sums = list(itertools.accumulate(weight for _, weight in weighed))
    places = (bisect.bisect_left(sums, step / steps * sums[-1] * (1 - ROUNDING)) for step in range(steps + 1))
    return tuple(round(weighed[place][0], 3) for place in places)


@pytest.fixture(scope="module")
def calibrated() -> list[Machine]:
    """The machine types, calibrated once."""
    return list(machines(PUBLISHED))


@pytest.fixture(scope="module")
def times(calibrated: list[Machine]) -> list[float]:
    """Measured over predicted of every published row that calibrated nothing."""
    rows = [one for machine in calibrated for one in scored(machine) if not one.calibrated]
    return [one.row.measured_s / one.predicted_s for one in rows]


@pytest.fixture(scope="module")
def by_evidence(calibrated: list[Machine]) -> dict[Evidence, Ratios]:
    """Measured over predicted of every published row, by evidence and table."""
    return ratios_by_evidence(calibrated)


@pytest.mark.stress
def test_the_kept_quantiles_are_those_of_the_tables(by_evidence: dict[Evidence, Ratios]) -> None:
    """Of step times and of peak memory, with as many rows."""
    sizes = [cell.paper / cell.simulated for cell in peak_memory(PUBLISHED)]
    assert PUBLISHED_MEMORY.count == len(sizes)
    assert PUBLISHED_MEMORY.ratios == pytest.approx(quantiles(sizes), abs=STALE)
    for evidence, kept in PUBLISHED_TIME.items():
        tables = by_evidence[evidence].values()
        assert kept.count == sum(map(len, tables))
        assert kept.ratios == pytest.approx(quantiles_of_tables(tables), abs=STALE)
        assert str(kept.count) in kept.source


@pytest.mark.parametrize("evidence", get_args(Evidence))
def test_an_interval_holds_what_it_says(evidence: Evidence, by_evidence: dict[Evidence, Ratios]) -> None:
    """Nine of ten published rows, within five in a hundred, lie in the interval of their kind of evidence."""
    ratios = [ratio for table in by_evidence[evidence].values() for ratio in table]
    low, high = PUBLISHED_TIME[evidence].interval(1.0)
    assert sum(low <= ratio <= high for ratio in ratios) / len(ratios) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("evidence", ["calibrated", "data sheet"])
def test_an_interval_holds_on_a_table_that_it_has_not_seen(
    evidence: Evidence, by_evidence: dict[Evidence, Ratios]
) -> None:
    """Each table against the interval of all others: nine of ten rows of the mean table."""
    found, tables = [], by_evidence[evidence]
    for name, own in tables.items():
        rest = quantiles_of_tables(ratios for other, ratios in tables.items() if other != name)
        found.append(sum(rest[1] <= ratio <= rest[-2] for ratio in own) / len(own))
    assert statistics.mean(found) == pytest.approx(0.9, abs=UNSEEN)


def test_weaker_evidence_makes_wider_intervals() -> None:
    """A measured step of the cluster itself leaves least to chance."""
    wide = {evidence: kept.interval(1.0) for evidence, kept in PUBLISHED_TIME.items()}
    assert (wide["calibrated"][1] - wide["calibrated"][0]) < (wide["data sheet"][1] - wide["data sheet"][0])


def test_an_interval_holds_on_rows_that_it_has_not_seen(times: list[float]) -> None:
    """Nine of ten rows of one half lie in the interval of the other."""
    shuffled = list(times)
    random.Random(0).shuffle(shuffled)
    half = len(shuffled) // 2
    low, high = Residuals.of(shuffled[:half], "one half").interval(1.0)
    inside = sum(low <= ratio <= high for ratio in shuffled[half:]) / (len(shuffled) - half)
    assert inside == pytest.approx(0.9, abs=COVERAGE)


@given(predicted=st.floats(1, 100), limit=st.floats(1, 100), more=st.floats(0, 50))
def test_more_memory_never_raises_the_odds(predicted: float, limit: float, more: float) -> None:
    """And they are a probability."""
    odds = PUBLISHED_MEMORY.exceeds(predicted, limit)
    assert 0 <= PUBLISHED_MEMORY.exceeds(predicted, limit + more) <= odds <= 1


def test_the_odds_are_those_of_a_known_law() -> None:
    """Ratios drawn from a log-normal: the share of fresh draws above a limit."""
    draw = random.Random(1)
    sample = Residuals.of([draw.lognormvariate(0.0, 0.1) for _ in range(400)], "drawn")
    fresh = sum(10 * draw.lognormvariate(0.0, 0.1) > 11.5 for _ in range(20_000)) / 20_000
    assert sample.exceeds(10, 11.5) == pytest.approx(fresh, abs=0.02)
    assert sample.exceeds(10, 10) == pytest.approx(0.5, abs=0.05)


def test_few_rows_say_less_than_many() -> None:
    """The same spread, known from ten rows, leaves more to chance than known from a thousand."""
    ratios = (0.9, 0.95, 1.0, 1.05, 1.1)
    few, many = (Residuals(source="", ratios=ratios, count=count) for count in (10, 1000))
    assert few.exceeds(1.0, 1.25) > many.exceeds(1.0, 1.25)
