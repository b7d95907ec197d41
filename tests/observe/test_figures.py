"""Numbers read as people write them."""

from __future__ import annotations

import math

import pytest

from shoal.observe import figures


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (figures.count(912), "912"),
        (figures.count(999.7), "1k"),
        (figures.count(14_234), "14.2k"),
        (figures.count(912_384), "912k"),
        (figures.count(7_000_000_000), "7G"),
        (figures.count(0), "0"),
        (figures.byte_size(912), "912 B"),
        (figures.byte_size(3_650_000), "3.65 MB"),
        (figures.duration(0.182), "182 ms"),
        (figures.duration(42.4), "42 s"),
        (figures.duration(59.7), "1 min 00 s"),
        (figures.duration(125), "2 min 05 s"),
        (figures.duration(3 * 3600 + 12 * 60), "3 h 12 min"),
        (figures.duration(2 * 86400 + 3 * 3600), "2 d 03 h"),
        (figures.duration(math.inf), "unknown"),
        (figures.milliseconds(0.00342), "3.42 ms"),
        (figures.percent(0.041), "4.1 %"),
        (figures.percent(0.7349), "73 %"),
        (figures.loss(2.04), "2.040"),
        (figures.loss(math.nan), "not finite"),
        (figures.number(3e-6), "3e-06"),
    ],
)
def test_a_figure_reads_as_it_should(written: str, expected: str) -> None:
    """Three or four digits that count, and the unit people use; rounding never gives 60 s or 1000 of a unit."""
    assert written == expected
