"""Numbers read as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from shoal import units


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.count(912), "912"),
        (units.count(999.7), "1k"),
        (units.count(14_234), "14.2k"),
        (units.count(912_384), "912k"),
        (units.count(7_000_000_000), "7G"),
        (units.count(0), "0"),
        (units.byte_size(912), "912 B"),
        (units.byte_size(3_650_000), "3.65 MB"),
        (units.duration(0.182), "182 ms"),
        (units.duration(42.4), "42 s"),
        (units.duration(59.7), "1 min 00 s"),
        (units.duration(125), "2 min 05 s"),
        (units.duration(3 * 3600 + 12 * 60), "3 h 12 min"),
        (units.duration(2 * 86400 + 3 * 3600), "2 d 03 h"),
        (units.duration(math.inf), "unknown"),
        (units.milliseconds(0.00342), "3.42 ms"),
        (units.percent(0.041), "4.1 %"),
        (units.percent(0.7349), "73 %"),
        (units.loss(2.04), "2.040"),
        (units.loss(math.nan), "not finite"),
        (units.number(3e-6), "3e-06"),
        (units.duration(7290), "2 h 01 min"),
        (units.duration(-65), "-1 min 05 s"),
        (units.seconds(7290), "2 h 01 min"),
        (units.seconds(4.561), "4.56 s"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(0.0009996), "1.00 ms"),
        (units.seconds(8.5e-7), "850 ns"),
        (units.seconds(0), "0 s"),
        (units.seconds(math.nan), "unknown"),
        (units.memory_size(0), "0 B"),
        (units.memory_size(3 * 2**20), "3 MiB"),
        (units.memory_size(1000 * 2**20), "0.977 GiB"),
        (units.memory_size(79.6 * 2**30), "79.6 GiB"),
        (units.clock(42), "0:42"),
        (units.clock(725.4), "12:05"),
        (units.clock(30 * 3600 + 61), "30:01:01"),
        (units.quantity(12345.6), "12,346"),
        (units.quantity(0.01234), "0.0123"),
        (units.plural(1, "training sample"), "1 training sample"),
        (units.plural(1200, "step"), "1,200 steps"),
        (units.plural(2, "batch", "batches"), "2 batches"),
    ],
)
def test_a_number_reads_as_it_should(written: str, expected: str) -> None:
    """Three or four digits that count, and the unit people use; rounding never gives 60 s or 1000 of a unit."""
    assert written == expected


@pytest.mark.parametrize(
    ("form", "least_power"),
    [(units.seconds, -36), (units.duration, -36), (units.memory_size, 0), (units.byte_size, 0), (units.percent, -12)],
)
def test_no_size_is_written_with_an_exponent(form: Callable[[float], str], least_power: int) -> None:
    """From a nanosecond to centuries, from a byte to a petabyte: the unit changes, the digits stay few."""
    for power in range(least_power, 60):
        for factor in (1.0, 2.5, 7.29, 9.99, 9.996):
            assert "e" not in form(factor * 10 ** (power / 4)).split(" ")[0]
