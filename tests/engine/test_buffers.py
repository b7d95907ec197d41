"""Buffers that a module changes in its forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.engine.batch_statistics import BufferGuard
from shoal.errors import UserCodeError
from tests.comm.groups import replicas
from tests.engine.same_math import Case, Pictures, alone, trajectory


class Running(nn.Module):
    """Keeps a running mean of what it sees, or counts its steps."""

    def __init__(self, *, of_samples: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 2)
        self.of_samples = of_samples
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.mean().detach() if self.of_samples else 1
        return self.layer(x.flatten(1))


def of_samples() -> nn.Module:
    return Running(of_samples=True)


def of_steps() -> nn.Module:
    return Running(of_samples=False)


def refused(place) -> str:
    try:
        trajectory(place, Case(model=of_samples, data=Pictures), None)
    except UserCodeError as error:
        return str(error)
    return ""


def test_a_buffer_that_follows_a_ranks_samples_is_refused_on_several_ranks(ranks) -> None:
    """Both ranks name it in the first step; one rank alone may keep it; a counter is no problem."""
    assert all("its buffer seen" in sentence for sentence in ranks(2, refused))
    alone(Case(model=of_samples, data=Pictures))
    _, _, weights = ranks(2, trajectory, Case(model=of_steps, data=Pictures), None)[1]
    assert weights["seen"] == Case().steps


def skipped(place) -> float:
    model = Running(of_samples=True)
    guard = BufferGuard(model, replicas(place).world)
    for value, committed in ((1.0, True), (float("nan"), False)):
        guard.start()
        model(torch.full((2, 64), value))
        guard.finish(committed=committed)
    return float(model.seen)


def test_a_skipped_step_leaves_no_trace_in_a_buffer(ranks) -> None:
    """A NaN that a skipped step wrote into a running mean is taken back."""
    assert ranks(1, skipped) == [pytest.approx(1.0)]
