"""What an old contribution is worth."""

from __future__ import annotations

import torch

from shoal.sync.server_part import compensated, scaled_by_staleness


def test_compensation_is_the_first_term_of_the_taylor_series() -> None:
    """For a loss of one parameter x^2 / 2 with gradient x: g + strength g^2 (x' - x), by hand."""
    gradient, now, then = torch.tensor([2.0, -3.0]), torch.tensor([1.5, -1.0]), torch.tensor([1.0, -2.0])
    found = compensated(gradient, now, then, strength=0.5)
    assert found.tolist() == [2.0 + 0.5 * 4.0 * 0.5, -3.0 + 0.5 * 9.0 * 1.0]


def test_without_strength_or_movement_nothing_is_compensated() -> None:
    """Bit for bit."""
    gradient, moved = torch.randn(64, generator=torch.Generator().manual_seed(1)), torch.ones(64)
    for now, strength in ((moved, 0.0), (torch.zeros(64), 0.7)):
        assert torch.equal(compensated(gradient, now, torch.zeros(64), strength=strength), gradient)


def test_scaling_begins_at_two_updates() -> None:
    """1 / max(1, tau)."""
    for tau, expected in ((0, 8.0), (1, 8.0), (2, 4.0), (4, 2.0)):
        assert scaled_by_staleness(torch.tensor([8.0]), tau).item() == expected
