"""Predicted beside measured layouts: which figures they come to."""

from __future__ import annotations

import pytest

from shoal.recipes.benchmarks.layouts_beside import Beside, checks, order_right, rows


def _one(
    name: str, measured_s: float, predicted_s: float, *, memory_error: float = 0.0, calibrated: bool = False
) -> Beside:
    return Beside(
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
    assert order_right(found) == 0.5
    assert order_right(found[:2]) == 1.0


def test_the_worst_comes_first_and_the_calibrated_last() -> None:
    """Whatever the sign."""
    found = [_one("given", 1.0, 1.0, calibrated=True), _one("near", 1.0, 1.02), _one("low", 1.0, 0.7)]
    assert [row["layout"] for row in rows(found)] == ["low", "near", "given"]


def test_the_calibrated_row_counts_in_memory_alone() -> None:
    """Its time is its own prediction."""
    found = [_one("given", 1.0, 1.0, memory_error=-0.2, calibrated=True), _one("a", 1.0, 1.3), _one("b", 2.0, 2.2)]
    values = {check["name"]: (check["value"], check["holds"]) for check in checks(found)}
    assert values["step time: median error"] == (pytest.approx(0.2), False)
    assert values["memory: share of layouts within 5 %"] == (pytest.approx(2 / 3, abs=1e-4), False)
    assert values["memory: most too low"] == (pytest.approx(0.2), False)
