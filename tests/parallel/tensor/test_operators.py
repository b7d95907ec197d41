"""Each operator against what it is defined to be, and its backward against its adjoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.errors import LayoutError
from shoal.parallel.tensor.operators import (
    check_sequence,
    enter,
    enter_sequence,
    leave,
    leave_sequence,
)
from tests.parallel.tensor.split import tensor_group
from tests.ranks import TestPlace

OPERATORS = {
    "enter": enter, "leave": leave, "enter_sequence": enter_sequence, "leave_sequence": leave_sequence,
}  # fmt: skip
BATCH, SEQUENCE, WIDTH = 3, 8, 5
# Small whole numbers: every sum is exact in every type.
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forward_and_backward(place: TestPlace, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """The output and the input's gradient of each operator, from inputs and gradients that follow from the rank."""
    group, results = tensor_group(place), {}
    for name, operator in OPERATORS.items():
        seq_in, seq_out = lengths(name, place.size)
        x = numbers(BATCH, seq_in, WIDTH, seed=place.rank, dtype=dtype).requires_grad_()
        grad = numbers(BATCH, seq_out, WIDTH, seed=100 + place.rank, dtype=dtype)
        given, kept = x.detach().clone(), grad.clone()
        # A layout in memory that is not the usual one.
        y = operator(x.transpose(1, 2).contiguous().transpose(1, 2), group)
        y.backward(grad)
        assert torch.equal(x.detach(), given), "the input was written to"
        assert torch.equal(grad, kept), "the gradient was written to"
        results[name] = (y.detach().clone(), x.grad.clone())
    return results


def lengths(name: str, size: int) -> tuple[int, int]:
    """Of the sequence before and behind an operator."""
    part = SEQUENCE // size
    return part if name == "enter_sequence" else SEQUENCE, part if name == "leave_sequence" else SEQUENCE


def expected(name: str, xs: list[Tensor], grads: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """By definition."""
    part = slice(rank * SEQUENCE // len(xs), (rank + 1) * SEQUENCE // len(xs))
    return {
        "enter": lambda: (xs[rank], sum(grads)),
        "leave": lambda: (sum(xs), grads[rank]),
        "enter_sequence": lambda: (torch.cat(xs, 1), sum(grads)[:, part]),
        "leave_sequence": lambda: (sum(xs)[:, part], torch.cat(grads, 1)),
    }[name]()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_operators_are_what_they_are_defined_to_be(ranks, world: int) -> None:
    """Output and gradient of all four, in all types; neither the input nor the gradient is written to."""
    for dtype in TYPES if world == 4 else TYPES[:1]:
        for rank, results in enumerate(ranks(world, forward_and_backward, dtype)):
            for name, (y, grad) in results.items():
                seq_in, seq_out = lengths(name, world)
                xs = [numbers(BATCH, seq_in, WIDTH, seed=r, dtype=dtype) for r in range(world)]
                grads = [numbers(BATCH, seq_out, WIDTH, seed=100 + r, dtype=dtype) for r in range(world)]
                wanted_y, wanted_grad = expected(name, xs, grads, rank)
                assert torch.equal(y, wanted_y), f"{name}, {dtype}, forward"
                assert torch.equal(grad, wanted_grad), f"{name}, {dtype}, backward"


def test_a_sequence_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(LayoutError, match=r"10 tokens .* tensor=4 .* nearest: 8 or 12 tokens"):
        check_sequence(10, 4)
