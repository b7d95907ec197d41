"""Where the time of a step went, on steps whose every second is known."""

from __future__ import annotations

import msgspec
import pytest

from shoal.observe.profile.recording import Called, Step, exposed, interval, joined, rounds
from shoal.observe.profile.split import operators, split
from tests.observe.profile.recordings import recording

KEYS = ("all/0", "w/0", "w/1", "all/1")


def test_the_parts_do_not_overlap_and_add_up() -> None:
    """Two seconds of data, an operator that reaches into a wait, a wait, and the rest: 2 + 3 + 4 + 1 = 10."""
    found = split(
        recording(data_s=2, slices=[("aten::mm", 2, 7), ("aten::add", 9, 10)], waits=[("w/0", 5, 8)], cpu_s=5)
    )
    assert (found.data_s, found.communication_s, found.compute_s, found.host_s) == (2, 3, 4, 1)
    assert found.step_s == 10
    assert found.cpu_share == 1.0


def test_an_operator_s_own_time_is_without_what_it_calls() -> None:
    """A linear layer of 6 s that calls a product of 4 s has 2 s of its own."""
    found = operators(recording(slices=[("aten::linear", 0, 6), ("aten::mm", 1, 5), ("aten::mm", 7, 8)]))
    assert [(one.name, one.own_s, one.calls) for one in found] == [("aten::mm", 5, 2), ("aten::linear", 2, 1)]


def test_on_a_gpu_only_the_kernels_count_and_hidden_communication_is_free() -> None:
    """A communication kernel of 4 s, of which 3 s lie beside one that computes: 1 s is exposed."""
    found = split(recording(slices=[("aten::mm", 0, 9)], kernels=[("gemm", 1, 6), ("ncclDevKernel_AllReduce", 3, 7)]))
    assert (found.compute_s, found.communication_s, found.host_s) == (5, 1, 4)


def test_a_wait_is_for_the_rank_that_came_last_and_then_for_the_wire() -> None:
    """Rank 0 calls at 2 and waits from 3 to 9; rank 1 comes at 7: 4 s for rank 1, 2 s for the wire. Rank 1 itself waits
    for the wire alone."""
    early = recording(0, calls=[("w/0", 2, 9)], waits=[("w/0", 3, 9)])
    late = recording(1, calls=[("w/0", 7, 9)], waits=[("w/0", 7, 9)])
    calls = joined([early, late])
    assert exposed(early, calls).for_rank_s == {1: 4}
    assert exposed(early, calls).wire_s == 2
    assert exposed(late, calls).for_rank_s == {}
    assert exposed(late, calls).wire_s == 2


def test_a_rank_that_sees_the_end_late_was_kept_by_itself() -> None:
    """Both call at 2; rank 0 sees the end at 4 and rank 1, stopped meanwhile, at 9: 2 s of wire for both, and 5 s that
    are rank 1's own."""
    quick = recording(0, calls=[("w/0", 2, 4)], waits=[("w/0", 2, 4)])
    stopped = recording(1, calls=[("w/0", 2, 9)], waits=[("w/0", 2, 9)])
    calls = joined([quick, stopped])
    assert (exposed(quick, calls).wire_s, exposed(quick, calls).own_s) == (2, 0)
    assert (exposed(stopped, calls).wire_s, exposed(stopped, calls).own_s) == (2, 5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_call_is_joined_when_all_its_ranks_have_recorded_it(ranks: int) -> None:
    """Of two ranks it is whole, of three one is missing."""
    made = [recording(rank, calls=[("w/0", rank, 9)], ranks=ranks) for rank in range(2)]
    assert set(joined(made)) == ({"w/0"} if ranks == 2 else set())


def test_what_a_rank_stands_still_for_is_not_more_than_its_communication() -> None:
    """Waits before and after the steps, such as for all to begin, and two at a time, count once: 3 of 10 s."""
    waiting = recording(0, waits=[("all/0", -20, 0), ("w/0", 5, 7), ("w/1", 6, 8), ("all/1", 10, 19)])
    late = recording(1, calls=[("all/0", 0, 0), ("w/0", 7, 7), ("w/1", 8, 8), ("all/1", 19, 19)])
    early = msgspec.structs.replace(
        waiting, calls=[Called(key, "all_reduce", 2, 1000, -20 if key == "all/0" else 5, 20) for key in KEYS]
    )
    found = exposed(early, joined([early, late]))
    assert found.for_rank_s == {1: 3}
    assert found.wire_s + found.own_s == 0
    assert split(early).communication_s == 3


def test_rounds_hold_every_step_once() -> None:
    """At most 20, of equally many steps; the last has the rest, and each what lies in its steps."""
    steps = [Step(number, number, number, number + 1.0, 0.0, 1.0) for number in range(47)]
    whole = msgspec.structs.replace(recording(slices=[("aten::mm", 3.2, 3.4)]), steps=steps)
    found = rounds(whole)
    assert [len(one.steps) for one in found] == [2] * 19 + [9]
    assert [step for one in found for step in one.steps] == steps
    assert [len(one.slices) for one in found[:3]] == [0, 1, 0]


def test_the_interval_is_students() -> None:
    """Of 0.1, 0.2, 0.3 with two degrees of freedom: 0.2 and 6.96 times 0.1 / sqrt(3) to both sides."""
    assert interval([0.1, 0.2, 0.3]).low == pytest.approx(0.2 - 6.96 * 0.1 / 3**0.5)
    assert interval([0.1, 0.2, 0.3]).high == pytest.approx(0.2 + 6.96 * 0.1 / 3**0.5)
