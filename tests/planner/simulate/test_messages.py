"""Collectives played message by message against their alpha-beta closed forms, and ports that are shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.cost import alpha_beta
from shoal.planner.simulate.play import Tasks, play
from tests.planner.simulate import messages
from tests.planner.simulate.messages import SimulatedLink, Step, seconds

LINK = SimulatedLink(latency_s=5e-6, bytes_s=25e9)
SIZE = 1e7
ROUNDING = 1e-9
"""Relative: the same float64 sums in another order."""

PAIRS = (
    (messages.ring_all_gather, alpha_beta.ring_all_gather, (2, 3, 8, 13)),
    (messages.ring_all_reduce, alpha_beta.ring_all_reduce, (2, 3, 8, 13)),
    (messages.pairwise_all_to_all, alpha_beta.pairwise_all_to_all, (2, 5, 8)),
)


@pytest.mark.parametrize(("played", "closed", "worlds"), PAIRS)
def test_an_algorithm_takes_what_its_closed_form_says(
    played: Callable[[int, float], list[Step]], closed: Callable[..., float], worlds: tuple[int, ...]
) -> None:
    """Equal links, an idle network: exactly alpha-beta."""
    for ranks in worlds:
        wanted = closed(ranks, SIZE, latency_s=LINK.latency_s, bytes_s=LINK.bytes_s)
        assert seconds(played(ranks, SIZE), ranks, LINK) == pytest.approx(wanted, rel=ROUNDING)


def test_one_slow_link_slows_the_whole_ring() -> None:
    """A link of half the rate: every chunk passes it, so that the ring moves at its pace."""
    slow = SimulatedLink(latency_s=0.0, bytes_s=1e9)
    fast = SimulatedLink(latency_s=0.0, bytes_s=2e9)
    got = seconds(messages.ring_all_reduce(8, SIZE), 8, fast, links={(2, 3): slow})
    assert got == pytest.approx(alpha_beta.ring_all_reduce(8, SIZE, latency_s=0, bytes_s=1e9), rel=ROUNDING)


def test_flows_on_one_port_share_it_evenly() -> None:
    """1 s and 3 s of work that start together end at 2 s and 4 s; one that comes at 2 s finds half of the port."""
    plan = Tasks(streams=0, ports=1)
    plan.add("short", "transfer", ports=(0,), busy_s=1)
    plan.add("long", "transfer", ports=(0,), busy_s=3)
    wait = plan.add("wait", "join", busy_s=2)
    plan.add("late", "transfer", ports=(0,), busy_s=1, after=[wait])
    assert play(plan).ends_s == pytest.approx([2, 5, 2, 4])


def test_a_stream_takes_tasks_in_the_order_in_which_they_got_ready() -> None:
    """One at a time, first come, first served; a latency occupies nobody."""
    plan = Tasks(streams=1, ports=0)
    first = plan.add("first", "compute", stream=0, busy_s=2, latency_s=5)
    plan.add("after first", "compute", stream=0, busy_s=1, after=[first])
    plan.add("second", "compute", stream=0, busy_s=1)
    assert play(plan).starts_s == pytest.approx([0, 7, 2])
    with pytest.raises(ValueError, match="name those only"):
        plan.add("wrong", "compute", after=[9])
