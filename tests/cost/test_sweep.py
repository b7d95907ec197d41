"""Measured operators at any size, and what the host takes beside them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.operators import HostOverhead, host_overhead_of
from shoal.cost.sweep import Sweep, sweep_of
from shoal.errors import ConfigError
from shoal.topology.calibration import OperatorTime

EXACT = 1e-12
ALPHA, BETA = 20e-6, 1e-9
SIZES = (64, 256, 1024)
FACTOR = 4
"""Between neighbouring sizes; alpha + beta x lies between proportional and constant, so no guess is further off."""


def _time(m: int, n: int, k: int) -> OperatorTime:
    seconds = ALPHA + BETA * m * n * k
    return OperatorTime(
        operator="linear", dtype="float32", m=m, n=n, k=k, ranks=1, forward_s=seconds, backward_s=2 * seconds
    )


def _sweep() -> Sweep:
    return sweep_of(_time(*size) for size in itertools.product(SIZES, SIZES, (1,)))


def test_at_a_measured_size_it_is_the_measurement() -> None:
    """Forward and backward."""
    for m, n in itertools.product(SIZES, SIZES):
        one = _time(m, n, 1)
        assert _sweep().seconds(m, n) == pytest.approx((one.forward_s, one.backward_s), rel=EXACT)


@given(m=st.integers(SIZES[0], SIZES[-1]), n=st.integers(SIZES[0], SIZES[-1]), more=st.integers(1, 64))
def test_more_work_takes_longer_and_between_sizes_it_lies_between(m: int, n: int, more: int) -> None:
    """For operators that cost alpha + beta x."""
    found = _sweep().seconds(m, n)[0]
    assert _sweep().seconds(m + more, n)[0] >= found * (1 - EXACT)
    assert 1 / FACTOR**2 < found / _time(m, n, 1).forward_s < FACTOR**2


def test_beyond_the_largest_size_the_rate_stays() -> None:
    """Twice the rows, twice the seconds."""
    largest = _sweep().seconds(SIZES[-1], SIZES[-1])[0]
    assert _sweep().seconds(2 * SIZES[-1], SIZES[-1])[0] == pytest.approx(2 * largest, rel=EXACT)


def test_below_the_smallest_size_a_launch_costs_what_it_costs() -> None:
    """One row takes as long as the smallest measured number of them; none takes nothing."""
    assert _sweep().seconds(1, SIZES[0]) == _sweep().seconds(SIZES[0], SIZES[0])
    assert _sweep().seconds(0, SIZES[0]) == (0.0, 0.0)


def test_a_hole_in_the_grid_is_refused_by_name() -> None:
    """And not bridged in silence."""
    times = [_time(m, n, 1) for m, n in itertools.product(SIZES, SIZES) if (m, n) != (256, 256)]
    with pytest.raises(ConfigError, match=r"linear lack the size \(256, 256, 1\).*shoal bench products"):
        sweep_of(times)


def test_three_steps_tell_the_host_apart() -> None:
    """Per step, microbatch and layer, once the operators are subtracted."""
    host = HostOverhead(step_s=3e-3, microbatch_s=2e-3, layer_s=5e-4)

    def operators_s(layers: int, microbatches: int) -> float:
        return 1e-4 * layers * microbatches

    steps = {
        size: host.seconds(layers=size[0], microbatches=size[1]) + operators_s(*size)
        for size in ((1, 1), (5, 1), (1, 5))
    }
    found = host_overhead_of(steps, operators_s)
    assert (found.step_s, found.microbatch_s, found.layer_s) == pytest.approx((3e-3, 2e-3, 5e-4), rel=1e-9)
