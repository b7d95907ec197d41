"""The norm of a whole gradient."""

from __future__ import annotations

import pytest
import torch

from shoal.maths.norm import ROW, SHORT, JointNorm, two_norm

ROUNDING = 1e-7
"""Of float32 squares in rows of 512, added in float64, relative."""


@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, ROW + 1, 3_000_017])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_that_of_float64(numel: int, dtype: torch.dtype) -> None:
    """However many numbers there are, and however large a few of them."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=dtype) * 1e-3
    x[: numel // 5000] *= 1000
    assert float(two_norm(x)) == pytest.approx(float(x.double().square().sum().sqrt()), rel=ROUNDING)


def test_the_norm_of_several_is_that_of_all_their_numbers() -> None:
    """Long and short ones, empty ones, and of two types."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(3,), (), (0,), (SHORT + 1,), (70, 50), (5, SHORT)]
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    tensors.append(torch.randn(9, generator=generator, dtype=torch.float64))
    whole = torch.cat([tensor.double().flatten() for tensor in tensors])
    found = JointNorm(tensors)(tensors)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float(whole.square().sum().sqrt()), rel=ROUNDING)
