"""What a proof takes for a difference, and what for rounding."""

from __future__ import annotations

import pytest
import torch

from shoal.engine.tolerances import CANCELLED_ROUNDINGS, ROUNDINGS, SINGLE, HeldBox, compare_gradients
from shoal.topology.holding import whole

WANTED = {"weight": torch.ones(64), "bias": torch.full((4,), 1e-9)}
NOISE = 1e-9


def _findings(bias: float, weight: float = 1.0, *, rounding: float = NOISE) -> dict[str, bool]:
    parts = [
        HeldBox("weight", 0, whole((64,)), torch.full((64,), weight)),
        HeldBox("bias", 0, whole((4,)), torch.full((4,), bias)),
    ]
    found = compare_gradients(1, parts, WANTED, tolerances=SINGLE, rounding=lambda: {"bias": rounding, "weight": 1.0})
    return {finding.name: finding.holds for finding in found}


def test_a_gradient_that_is_rounding_alone_may_differ_by_what_rounding_does() -> None:
    """By as much as the reference's own changes in another order, times a bound, and no more."""
    assert _findings(20e-9) == {"weight": True, "bias": True}
    assert _findings(20e-9, rounding=0.0) == {"weight": True, "bias": False}
    assert _findings(ROUNDINGS * NOISE + 2e-9) == {"weight": True, "bias": False}


def test_a_gradient_that_is_none_is_never_excused() -> None:
    """Whatever the rounding is said to be."""
    assert _findings(1e-9, weight=1.001) == {"weight": False, "bias": True}


def test_a_gradient_that_cancels_in_part_is_excused_by_its_own_rounding_up_to_a_bound() -> None:
    """Measured rounding excuses some of it, none where one process shows none, and nothing beyond the bound."""

    def holds(error: float, rounding: float) -> bool:
        parts = [HeldBox("weight", 0, whole((64,)), torch.full((64,), 1 + error, dtype=torch.float64))]
        wanted = {"weight": torch.ones(64, dtype=torch.float64)}
        (found,) = compare_gradients(1, parts, wanted, tolerances=SINGLE, rounding=lambda: {"weight": rounding * 8})
        return found.holds

    assert holds(9e-6, 0.0)
    assert holds(5e-5, 1e-5)
    assert not holds(5e-5, 0.0)
    assert not holds(5e-5, 5e-5 / CANCELLED_ROUNDINGS / 1.1)
    assert not holds(2.1e-4, 1.0)


def test_the_rounding_is_not_asked_for_where_all_holds() -> None:
    """It costs the reference another forward and backward."""
    parts = [HeldBox("weight", 0, whole((64,)), torch.ones(64))]
    assert compare_gradients(1, parts, WANTED, tolerances=SINGLE, rounding=lambda: pytest.fail("asked"))[0].holds
