"""The figures that follow from predicted and measured layouts."""

from __future__ import annotations

import pytest

from benchmarks.layouts_predicted import Compared, checks_of, order_share, rows_of


def _one(
    name: str, measured_s: float, predicted_s: float, *, memory_error: float = 0.0, calibrated: bool = False
) -> Compared:
    return Compared(
        layout=name,
        ranks=2,
        measured_s=measured_s,
        predicted_s=predicted_s,
        measured_bytes=1e6,
        predicted_bytes=1e6 * (1 + memory_error),
        calibrated=calibrated,
    )


def test_only_pairs_that_are_far_apart_have_an_order() -> None:
    """Of three layouts two lie within a tenth; of the two pairs that do not, one is predicted the wrong way round."""
    found = [_one("a", 1.0, 1.0), _one("b", 1.05, 0.9), _one("c", 1.5, 0.95)]
    assert order_share(found) == 0.5
    assert order_share(found[:2]) == 1.0


def test_the_worst_comes_first_and_the_calibrated_last() -> None:
    """The sign of the error does not matter."""
    found = [_one("first", 1.0, 1.0, calibrated=True), _one("near", 1.0, 1.02), _one("low", 1.0, 0.7)]
    assert [row["layout"] for row in rows_of(found)] == ["low", "near", "first"]


def test_the_calibrated_row_counts_in_memory_alone() -> None:
    """Its prediction was fitted to its time."""
    found = [_one("first", 1.0, 1.0, memory_error=-0.2, calibrated=True), _one("a", 1.0, 1.3), _one("b", 2.0, 2.2)]
    values = {check["name"]: (check["value"], check["holds"]) for check in checks_of(found)}
    assert values["step time: median error"] == (pytest.approx(0.2), False)
    assert values["memory: share of layouts within 5 %"] == (pytest.approx(2 / 3, abs=1e-4), False)
    assert values["memory: most too low"] == (pytest.approx(0.2), False)
