"""Rates of attention kernels: what was published, and what they may never do between and beyond it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.matmul import LENGTHS, Kernel, attention_share
from shoal.topology.cluster import Architecture

A100, H100 = 312e12, 989e12
ROUNDING = 0.5e12


@pytest.mark.parametrize(("head_size", "tokens", "together"), [(64, 512, 88), (64, 16384, 171), (128, 2048, 155)])
def test_both_directions_together_are_the_published_ones(head_size: int, tokens: int, together: float) -> None:
    """Figure 4 of arXiv:2307.08691: 3.5 times the forward's operations in the seconds of both."""
    forward, backward = (
        A100 * attention_share("ampere", "flash-2", head_size=head_size, tokens=tokens, backward=way)
        for way in (False, True)
    )
    assert 3.5 / (1 / forward + 2.5 / backward) == pytest.approx(together * 1e12, abs=2 * ROUNDING)


def test_flash_attention_3_is_as_much_faster_as_published() -> None:
    """Heads of 128, 16k tokens, forward under a causal mask: 616 and 335 TFLOP/s (arXiv:2407.08608, figure 5)."""
    best, second = (
        H100 * attention_share("hopper", kernel, head_size=128, tokens=16384, backward=False)
        for kernel in ("best", "flash-2")
    )
    assert best == pytest.approx(616e12, abs=ROUNDING)
    assert second == pytest.approx(335e12, abs=ROUNDING)


@given(
    architecture=st.sampled_from(get_args(Architecture)),
    kernel=st.sampled_from(get_args(Kernel)),
    head_size=st.integers(8, 512),
    tokens=st.floats(16, 1e6),
    longer=st.floats(1, 4),
)
def test_longer_sequences_are_never_slower_and_nothing_beats_the_peak(
    architecture: Architecture, kernel: Kernel, head_size: int, tokens: float, longer: float
) -> None:
    """The forward is never slower than the backward either."""
    shares = [
        attention_share(architecture, kernel, head_size=head_size, tokens=n, backward=way)
        for way in (True, False)
        for n in (tokens, tokens * longer)
    ]
    assert 0 < shares[0] <= shares[1] <= shares[3] < 1
    assert shares[0] <= shares[2] <= shares[3]


def test_published_lengths_are_met_exactly() -> None:
    """Between two of them a rate lies between both."""
    rates = [attention_share("hopper", "best", head_size=128, tokens=n, backward=True) for n in LENGTHS]
    assert rates == sorted(rates)
    between = attention_share("hopper", "best", head_size=128, tokens=3000, backward=True)
    assert rates[2] < between < rates[3]
