"""Intervals between checkpoints, and the share of time that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.interval import availability_optimal_s, daly_s, effective_share, young_s

DAY = 86400.0


def test_young_and_daly_by_hand() -> None:
    """A save of 2 minutes, a failure a day: sqrt(2 x 120 x 86400) = 4553.7 s; Daly's is a save shorter."""
    assert young_s(120, DAY) == pytest.approx(4553.68, abs=0.01)
    assert daly_s(120, DAY) == pytest.approx(4433.68, abs=0.01)
    assert daly_s(DAY, DAY) == DAY


@given(save=st.floats(1, 600), between=st.floats(1e4, 1e7), recovery=st.floats(0, 3600), factor=st.floats(0.3, 3))
def test_no_other_interval_leaves_more_time(save: float, between: float, recovery: float, factor: float) -> None:
    """The availability-optimal interval is the maximum of `effective_share`."""
    best = availability_optimal_s(save, between, recovery_s=recovery)
    at_best = effective_share(best, save, between, recovery_s=recovery)
    other = effective_share(max(best * factor, save), save, between, recovery_s=recovery)
    assert at_best >= other - 1e-12


@pytest.mark.parametrize("recovery", [0.0, 600.0, 7200.0])
def test_a_step_to_either_side_is_worse(recovery: float) -> None:
    """A thousandth away from the optimum, where failures are frequent and recovery is slow."""
    best = availability_optimal_s(60, 10_000, recovery_s=recovery)
    shares = [effective_share(best * factor, 60, 10_000, recovery_s=recovery) for factor in (0.999, 1, 1.001)]
    assert max(shares) == shares[1]


def test_llama_3_loses_less_than_a_tenth() -> None:
    """419 interruptions in 54 days on 16,384 devices (arXiv:2407.21783): over 90 % effective, as published."""
    between = 54 * DAY / 419
    interval = availability_optimal_s(5, between, recovery_s=600)
    assert 0.9 < effective_share(interval, 5, between, recovery_s=600) < 0.96


def test_an_interval_no_longer_than_its_save_trains_nothing() -> None:
    """All time goes to saving."""
    assert effective_share(60, 60, DAY, recovery_s=0) == 0
