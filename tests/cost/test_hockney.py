"""The fit finds the line it was made from, weighs relative errors, and never goes below zero."""

from __future__ import annotations

import math

import pytest

from shoal.cost.alpha_beta import fit

SIZES = [2.0**power for power in range(2, 27, 2)]
EXACT = 1e-9
"""Rounding of sums over twelve points whose weights span ten decades."""


def test_a_line_is_found_again() -> None:
    line = fit(SIZES, [3e-6 + 2e-10 * size for size in SIZES])
    assert line.alpha_s == pytest.approx(3e-6, rel=EXACT)
    assert line.beta_s == pytest.approx(2e-10, rel=EXACT)
    assert line.worst_off < EXACT
    assert line.bytes_s == pytest.approx(5e9, rel=EXACT)


def test_short_messages_count_as_much_as_long_ones() -> None:
    """Least squares of seconds would give away the latency for the last per mille of the rate."""
    times = [3e-6 + 2e-10 * size for size in SIZES]
    times[-1] *= 1.1
    assert fit(SIZES, times).alpha_s == pytest.approx(3e-6, rel=0.02)


def test_no_other_line_is_nearer() -> None:
    times = [(3e-6 + 2e-10 * size) * (1 + 0.2 * math.sin(7 * i)) for i, size in enumerate(SIZES)]
    line = fit(SIZES, times)

    def off(alpha: float, beta: float) -> float:
        return sum(((alpha + beta * size - time) / time) ** 2 for size, time in zip(SIZES, times, strict=True))

    least = off(line.alpha_s, line.beta_s)
    for factor in (0.99, 1.01):
        assert off(line.alpha_s * factor, line.beta_s) > least
        assert off(line.alpha_s, line.beta_s * factor) > least


@pytest.mark.parametrize(
    ("times", "alpha", "beta"),
    [([1.0, 4.0, 16.0], 0.0, None), ([5.0, 3.0, 2.0], None, 0.0)],
    ids=["steeper than a line from zero", "falling"],
)
def test_neither_is_negative(times: list[float], alpha: float | None, beta: float | None) -> None:
    line = fit([1.0, 2.0, 3.0], times)
    assert alpha is None or line.alpha_s == alpha
    assert beta is None or line.beta_s == beta
    assert line.alpha_s >= 0
    assert line.beta_s >= 0


def test_one_size_makes_no_line() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit([8.0, 8.0], [1.0, 2.0])
