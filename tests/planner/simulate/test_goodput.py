"""Simulated weeks against the closed forms of cost.interval, and against a published job."""

from __future__ import annotations

import math

import pytest

from benchmarks.simulate import best_interval
from shoal.cost.interval import availability_optimal_s, daly_s, effective_share, young_s
from shoal.planner.simulate.goodput import Faults, goodput

YEAR_S = 365 * 86400.0
INTERVALS = 0.10
"""The promise: the simulator's best interval within 10 % of the formula."""
SHARE = 0.01
"""Shares over some thousand failures: the standard error is below a third of this."""

LLAMA = Faults(between_s=54 * 86400 / 419, recovery_s=600, save_s=2)
"""419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section 3.3.4); recovery assumed."""


@pytest.mark.parametrize(
    ("save_s", "between_s", "recovery_s"), [(30, 20_000, 600), (120, 40_000, 300), (5, 10_000, 60), (200, 10_000, 300)]
)
def test_the_best_interval_is_the_formulas(save_s: float, between_s: float, recovery_s: float) -> None:
    """Young's and the availability-optimal interval, seeds 0 and 1, 2,000 failures each. Of the last row a save takes a
    tenth of the interval: whether it is counted shows."""
    faults = Faults(between_s=between_s, recovery_s=recovery_s, save_s=save_s)
    found = best_interval(faults, wall_s=2000 * between_s, seeds=range(2), around_s=young_s(save_s, between_s))
    assert found == pytest.approx(availability_optimal_s(save_s, between_s, recovery_s=recovery_s), rel=INTERVALS)
    assert found - save_s == pytest.approx(young_s(save_s, between_s), rel=INTERVALS)
    assert found - 2 * save_s == pytest.approx(daly_s(save_s, between_s), rel=INTERVALS)


def test_a_job_like_llamas_trains_nine_tenths_of_its_time() -> None:
    """Published: an effective training time over 90 %; a save every ten minutes, ten minutes to recover."""
    found = goodput(LLAMA, every_s=600, wall_s=YEAR_S)
    assert 0.90 < found.effective_share < 0.96
    assert found.failures == pytest.approx(YEAR_S / LLAMA.between_s, rel=0.1)


def test_the_share_is_the_closed_forms() -> None:
    """Rare failures: the share of all time that lasts, within a hundredth."""
    faults = Faults(between_s=30_000, recovery_s=300, save_s=20)
    found = goodput(faults, every_s=1000, wall_s=3000 * 30_000)
    wanted = effective_share(1020, 20, 30_000, recovery_s=300)
    assert found.effective_share == pytest.approx(wanted, abs=SHARE)


def test_all_time_is_somewhere() -> None:
    """Trained, saving, lost and recovering add up to the wall; the same seed is the same job."""
    found = goodput(LLAMA, every_s=1800, wall_s=4 * 7 * 86400, seed=5)
    assert found.trained_s + found.saving_s + found.lost_s + found.recovering_s == pytest.approx(found.wall_s)
    assert found == goodput(LLAMA, every_s=1800, wall_s=4 * 7 * 86400, seed=5)


def test_without_failures_only_saves_cost() -> None:
    """An infinite time between failures: nothing lost."""
    found = goodput(Faults(between_s=math.inf, recovery_s=60, save_s=10), every_s=90, wall_s=100_000)
    assert (found.failures, found.lost_s) == (0, 0)
    assert found.effective_share == pytest.approx(0.9)


def test_seconds_that_cannot_be_are_refused() -> None:
    """No failures of negative distance, no interval of nothing."""
    with pytest.raises(ValueError, match="failures come more than 0 s apart"):
        Faults(between_s=0, recovery_s=1, save_s=1)
    with pytest.raises(ValueError, match="some training between two saves"):
        goodput(LLAMA, every_s=0, wall_s=1)
