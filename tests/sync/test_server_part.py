"""What one server does with contributions, brought by threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from shoal.errors import CollectiveError
from shoal.sync.admission import Asynchronous, Bounded, Contribution, FirstComers
from shoal.sync.server_part import Merge, Sent, ServedPart, Standing
from tests.waiting import HANG_S

NUMEL, LR = 8, 0.5


def part_of(merge: Merge) -> ServedPart:
    """A part whose optimizer is plain SGD."""
    part = ServedPart(torch.zeros(NUMEL), merge=merge)

    def step(lr: float, gradient: Tensor) -> None:
        part.values.sub_(lr * gradient)

    part.step = step
    return part


def contribute(part: ServedPart, worker: int, version: int, gradient: Tensor | None, *, number: int = 0) -> None:
    part.contribute(Contribution(worker, number, version), Sent(None if gradient is None else gradient.clone(), LR))


def read(part: ServedPart, worker: int) -> tuple[Tensor, Standing]:
    """What a worker of this rank reads."""
    values = torch.empty(NUMEL)
    return values, part.await_release(worker, values)


def test_an_update_is_the_mean_of_what_is_finite() -> None:
    """A worker that has nothing to add takes part, and does not make the mean smaller."""
    part = part_of(Merge())
    part.begin(FirstComers(range(3)), torch.ones(NUMEL))
    contribute(part, 0, 0, torch.full((NUMEL,), 2.0))
    contribute(part, 1, 0, None)
    contribute(part, 2, 0, torch.full((NUMEL,), 4.0))
    for worker in range(3):
        values, standing = read(part, worker)
        assert values.tolist() == [1.0 - LR * 3.0] * NUMEL
        assert (standing.version, standing.counted) == (1, 1)


def test_without_anything_finite_nothing_moves() -> None:
    """And the workers go on."""
    part = part_of(Merge())
    part.begin(FirstComers(range(1)), torch.ones(NUMEL))
    contribute(part, 0, 0, None)
    values, standing = read(part, 0)
    assert values.tolist() == [1.0] * NUMEL
    assert standing.version == 1


def test_sums_do_not_depend_on_who_comes_first() -> None:
    """To the bit: contributions are added in the order of the workers."""
    gradients = torch.randn(5, NUMEL, generator=torch.Generator().manual_seed(2))
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        part = part_of(Merge())
        part.begin(FirstComers(range(5)), torch.zeros(NUMEL))
        for worker in order:
            contribute(part, worker, 0, gradients[worker])
        found.append(part.end().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("merge", "second"),
    [
        (Merge(adds=True), 3.0),
        (Merge(adds=True, staleness="scaled"), 1.5),
        (Merge(adds=True, staleness="compensated", strength=0.0), 3.0),
        (Merge(adds=True, staleness="compensated", strength=2 * 0.1), 3.0 + 0.1 * 9.0 * -(2 * LR * 1.0)),
    ],
    ids=["plain", "scaled", "without strength", "compensated"],
)
def test_what_an_old_gradient_is_worth(merge: Merge, second: float) -> None:
    """Worker 1's gradient 3 is of version 0; worker 0 has moved the values by two updates of 1 meanwhile. Both bring
    half of their gradients."""
    part = part_of(merge)
    part.begin(Asynchronous(range(2)), torch.zeros(NUMEL))
    for number in range(2):
        contribute(part, 0, number, torch.full((NUMEL,), 2.0 / 2), number=number)
        read(part, 0)
    contribute(part, 1, 0, torch.full((NUMEL,), 3.0 / 2))
    values, standing = read(part, 1)
    assert values.tolist() == pytest.approx([-2 * LR * 1.0 - LR * second / 2] * NUMEL)
    assert standing.staleness == 2


def test_a_read_stays_as_it_is_while_others_update() -> None:
    """It may be on the wire."""
    part = part_of(Merge(adds=True))
    part.begin(Asynchronous(range(2)), torch.zeros(NUMEL))
    contribute(part, 0, 0, torch.ones(NUMEL))
    values, _, _ = part.await_changes(0)
    before = values.clone()
    contribute(part, 1, 0, torch.ones(NUMEL))
    assert torch.equal(values, before)
    assert not torch.equal(part.end(), before)


def test_what_a_worker_lends_may_change_when_it_has_contributed() -> None:
    """Whether its gradient is used at once, or waits for others."""
    rules = (
        (FirstComers(range(2)), Merge()),
        (Bounded(range(2), bound=1), Merge()),
        (Asynchronous(range(2)), Merge(adds=True)),
    )
    for rule, merge in rules:
        part = part_of(merge)
        part.begin(rule, torch.zeros(NUMEL))
        for worker, gradient in ((0, torch.full((NUMEL,), 2.0)), (1, torch.full((NUMEL,), 4.0))):
            part.contribute(Contribution(worker, 0, 0), Sent(gradient, LR, lent=True))
            gradient.fill_(100.0)
        assert part.end().tolist() == [-LR * (6.0 if merge.adds else 3.0)] * NUMEL
        assert len(part._spare) == (0 if merge.adds else 1), "the first one waits for the second, in a copy"


def test_a_thread_that_fails_frees_those_that_wait() -> None:
    """They raise, and say why."""
    part = part_of(Merge())
    part.begin(FirstComers(range(2)), torch.zeros(NUMEL))
    contribute(part, 0, 0, torch.ones(NUMEL))
    raised: list[str] = []

    def wait() -> None:
        try:
            read(part, 0)
        except CollectiveError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    part.fail(ValueError("worker 1 is gone"))
    thread.join(HANG_S)
    assert raised == ["this rank can serve its parameters no longer: worker 1 is gone"]
