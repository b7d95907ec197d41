"""Many ranks on few cores, and many groups one after the other: all finish, and nothing is left of what is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.comm.collective import GroupCollective
from tests.comm.shm.test_group import shared
from tests.held import held, none_more

pytestmark = pytest.mark.stress

RANKS, NUMEL, MANY_S = 64, 4096, 120.0
GROUPS, WARM_UP = 1000, 20
WINDOW = 40_000  # elements: enough for a call to be carried out in allocated memory


def sums_of_many(place: Any) -> list[str]:
    """What went wrong in a round of collectives; their results are known in closed form."""
    torch.set_num_threads(1)
    group = GroupCollective(shared(place, timeout_s=MANY_S))
    n, wrong = place.size, []
    total = torch.full((NUMEL,), float(place.rank))
    group.all_reduce(total).wait()
    if not torch.equal(total, torch.full((NUMEL,), n * (n - 1) / 2)):
        wrong.append(f"all_reduce gave {total[:2]}")
    part = torch.empty(NUMEL // n)
    group.reduce_scatter(part, torch.arange(float(NUMEL))).wait()
    if not torch.equal(part, n * torch.arange(float(NUMEL)).view(n, -1)[place.rank]):
        wrong.append(f"reduce_scatter gave {part[:2]}")
    gathered = torch.empty(n)
    group.all_gather(gathered, torch.tensor([float(place.rank)])).wait()
    exchanged = torch.empty(n)
    group.all_to_all(exchanged, torch.arange(float(n)) + n * place.rank).wait()
    if not torch.equal(gathered, torch.arange(float(n))):
        wrong.append(f"all_gather gave {gathered[:2]}")
    if not torch.equal(exchanged, torch.arange(float(n)) * n + place.rank):
        wrong.append(f"all_to_all gave {exchanged[:2]}")
    return wrong


def test_sixty_four_ranks_on_few_cores_finish(ranks: Any) -> None:
    assert ranks(RANKS, sums_of_many, timeout_s=MANY_S) == [[]] * RANKS


def left_over(place: Any) -> None:
    """A thousand groups more leave nothing more than a few."""
    torch.set_num_threads(1)
    for number in range(WARM_UP):
        _use(place, number)
    before = held()
    for number in range(WARM_UP, WARM_UP + GROUPS):
        _use(place, number)
    none_more(before)


def _use(place: Any, number: int) -> None:
    group = shared(place, f"group-{number}")
    collective = GroupCollective(group, group)
    collective.all_reduce(torch.ones(8)).wait()
    memory = collective.allocate(WINDOW, dtype=torch.float32, device=torch.device("cpu"))
    if number % 2:  # some are never used
        collective.all_reduce(memory).wait()
    group.shutdown()


def test_a_thousand_groups_leave_nothing(ranks: Any) -> None:
    """Each rank made, used and dropped them: no descriptor, mapping or thread more."""
    ranks(2, left_over, timeout_s=MANY_S)
