"""Buffers that a module changes in its forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.engine.batch_statistics import BufferGuard, StatisticsSync, StepBuffers
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
    assert all("changes seen in forward" in sentence for sentence in ranks(2, refused))
    alone(Case(model=of_samples, data=Pictures))
    _, _, weights = ranks(2, trajectory, Case(model=of_steps, data=Pictures), None)[1]
    assert weights["seen"] == Case().steps


def skipped(place) -> float:
    model = Running(of_samples=True)
    buffers = StepBuffers(model)
    guard = BufferGuard(buffers, replicas(place).world)
    for value, committed in ((1.0, True), (float("nan"), False)):
        buffers.start()
        buffers.rewind()
        model(torch.full((2, 64), value))
        guard.finish(committed=committed, moving_anywhere=guard.moving)
    return float(model.seen)


def test_a_skipped_step_leaves_no_trace_in_a_buffer(ranks) -> None:
    """A NaN that a skipped step wrote into a running mean is taken back."""
    assert ranks(1, skipped) == [pytest.approx(1.0)]


def test_statistics_of_a_batch_norm_that_begins_to_train_are_watched_from_then_on() -> None:
    """Its kernel changes no version of theirs: a step begins with them, is taken back to that, and leaves no trace."""
    norm = nn.Sequential(nn.BatchNorm1d(3))
    buffers, x = StepBuffers(norm), torch.randn(4, 3)
    for step in range(StepBuffers.WATCHED_STEPS + 3):
        norm.train(step >= StepBuffers.WATCHED_STEPS)
        buffers.start()
        before = [each.clone() for each in norm.buffers()]
        buffers.rewind()
        norm(x)
        buffers.take_back()
        assert all(map(torch.equal, before, norm.buffers())), step
        norm(x)
        buffers.rewind()
        assert all(map(torch.equal, before, norm.buffers())), step
        norm(x)
        buffers.finish(committed=step != StepBuffers.WATCHED_STEPS + 1)
    assert int(norm.get_buffer("0.num_batches_tracked")) == 2


class Late(Running):
    """Begins to follow its samples at the third forward; its buffer need not be saved."""

    def __init__(self) -> None:
        super().__init__(of_samples=True)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(x) if self.forwards >= 3 else self.layer(x.flatten(1))


def refused_late(place) -> str:
    try:
        trajectory(place, Case(model=Late, data=Pictures), None)
    except UserCodeError as error:
        return str(error)
    return ""


def test_a_buffer_that_begins_to_move_later_is_refused_too(ranks) -> None:
    """In the step after, on every rank alike, whether it is saved or not."""
    assert all("changes seen in forward" in sentence for sentence in ranks(2, refused_late))


def test_microbatches_see_the_buffers_that_the_step_began_with() -> None:
    """A counter counts steps, however they are cut; what follows samples is refused where microbatches would cut it."""
    for micro_samples in (None, 4, 3):
        _, _, weights = alone(Case(model=of_steps, data=Pictures), micro_samples)
        assert weights["seen"] == Case().steps
    with pytest.raises(UserCodeError, match="microbatches that see other samples"):
        alone(Case(model=of_samples, data=Pictures), 4)


def events(place, model: Callable[[], nn.Module]) -> list[str]:
    """What happens in two ranks' steps, in order: sums and comparisons of buffers, and updates."""
    told: list[str] = []
    compare, total = BufferGuard.compare, StatisticsSync.sum

    def compared(self: BufferGuard, **options: bool) -> None:
        told.append("compared")
        compare(self, **options)

    def summed(self: StatisticsSync) -> None:
        told.append("summed")
        total(self)

    hook = register_optimizer_step_pre_hook(lambda *_: told.append("updated"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BufferGuard, "compare", compared)
        patch.setattr(StatisticsSync, "sum", summed)
        trajectory(place, Case(model=model, data=Pictures), None)
    hook.remove()
    return told


def test_ranks_agree_on_buffers_before_the_update(ranks) -> None:
    """A rank that is lost while they do leaves the others with the whole state of the step before."""
    for told in ranks(2, events, of_steps):
        assert told == ["summed", "compared", "updated"] * Case().steps
