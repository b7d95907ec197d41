"""A model that counts its forwards in Python is seen, and one that keeps other numbers is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from shoal.own_loop.module_counts import ModuleCounts


class Counting(nn.Module):
    calls = 0
    tau, size, loss, limit = 1.0, 0, 0.0, 3


def by_class(module: Counting, number: int) -> None:
    module.calls += 1


def annealed(module: Counting, number: int) -> None:
    module.tau = max(0.1, module.tau * 0.9)


def samples(module: Counting, number: int) -> None:
    module.size += 16


def once_a_step(module: Counting, number: int) -> None:
    module.calls = 5


def logged(module: Counting, number: int) -> None:
    module.loss = 1 / (1 + number) ** 2


def switched(module: Counting, number: int) -> None:
    module.training = not module.training


def found(change: Callable[[Counting, int], None]) -> str | None:
    inner = Counting()
    counts, said = ModuleCounts(nn.Sequential(nn.Linear(2, 2), inner)), []
    for number in range(ModuleCounts.LOOKS):
        said.append(counts.look())
        change(inner, number)
    assert counts.is_over
    assert said[:-1] == [None, None]
    return said[-1]


@pytest.mark.parametrize(
    ("change", "where", "buffer"),
    [
        (by_class, "in 1.calls, 2 by now", 'register_buffer("calls", torch.tensor(0))'),
        (annealed, "in 1.tau, 0.81 by now", 'register_buffer("tau", torch.tensor(0.0))'),
        (samples, "in 1.size, 32 by now", 'register_buffer("size", torch.tensor(0))'),
    ],
)
def test_what_is_counted_by_microbatches_is_named(
    change: Callable[[Counting, int], None], where: str, buffer: str
) -> None:
    """And how to count once a step."""
    said = found(change)
    assert said is not None
    assert where in said
    assert buffer in said


@pytest.mark.parametrize("change", [once_a_step, logged, switched])
def test_other_numbers_are_left_alone(change: Callable[[Counting, int], None]) -> None:
    assert found(change) is None
