"""The warm-up of Deep Gradient Compression."""

from __future__ import annotations

import pytest
import torch

from shoal.codec.config import DGCConfig
from shoal.codec.top_k import DGC, fraction_at


def test_the_warm_up_is_that_of_the_paper() -> None:
    """25 %, 6.25 %, 1.6 %, 0.4 %, then 0.1 %, each as long."""
    found = [fraction_at(number, 0.001, warmup=10) for number in range(1, 13)]
    assert found == pytest.approx([0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.00390625] * 2 + [0.001] * 4)


@pytest.mark.parametrize("fraction", [1.0, 0.3, 0.25, 0.01])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_fewer_and_fewer_are_sent(fraction: float, warmup: int) -> None:
    """Never fewer than in the end, and as many as asked for after the warm-up."""
    found = [fraction_at(number, fraction, warmup=warmup) for number in range(1, 12)]
    assert found == sorted(found, reverse=True)
    assert found[warmup] == fraction
    assert all(fraction <= one <= max(fraction, 0.25) for one in found)


def test_a_payload_is_as_long_as_its_sum_says() -> None:
    """And another buffer is at a sum of its own."""
    whole = DGC(DGCConfig(fraction=0.01, warmup_steps=3))
    first, second = (whole.bound([], key=0, rank=0, ranks=1) for _ in range(2))
    first.begin(1)
    second.begin(4)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert [len(codec.encode(x)[0]) for codec in (whole, first, second)] == [10, 250, 10]
