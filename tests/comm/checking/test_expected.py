"""Which calls are expected, who says that ranks differ in one, and what is compared of those that are not."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from shoal.comm.checking.disagreement import Dissent
from shoal.comm.checking.fingerprint import Comparison, digests, fingerprint
from shoal.comm.checking.pending import CONTEXT, Recurrence

RANKS = 3


def right(calls: list[int]) -> list[bool]:
    """Which of the calls were the expected ones."""
    recurrence, found = Recurrence(), []
    for call in calls:
        found.append(recurrence.expected == call)
        recurrence.add(call)
    return found


def test_a_program_that_repeats_itself_is_expected() -> None:
    """From the third step on every call is guessed, where a step has long runs of the same call, too."""
    step = [1] * 12 + [2] + [1] * 9 + [3, 4]
    guessed = right(step * 5)
    assert not any(guessed[:CONTEXT])
    assert all(guessed[2 * len(step) :])


def test_what_happens_now_and_then_costs_little() -> None:
    """An evaluation after every few steps, in numbers that vary: a wrong guess where it begins, and a few behind it."""
    draw, step, evaluation = random.Random(0), [1, 2, 3, 4, 5, 6], [7, 7, 8, 7, 9]
    rounds = 20
    calls = [call for _ in range(rounds) for call in step * draw.randrange(3, 7) + evaluation]
    assert right(calls).count(False) < 4 * rounds


def test_ranks_that_called_alike_expect_alike() -> None:
    """What is expected follows from the calls so far, and from nothing else: whatever they were."""
    draw = random.Random(0)
    here, there = Recurrence(), Recurrence()
    for _ in range(2000):
        assert here.expected == there.expected
        call = draw.choice([here.expected or 0, draw.randrange(3)])
        here.add(call)
        there.add(call)


def test_all_is_forgotten_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept has a bound; the program is learnt anew."""
    monkeypatch.setattr("shoal.comm.checking.pending.MOST", 40)
    guessed = right([1, 2, 3, 4, 5] * 16)
    assert not any(guessed[41 : 40 + CONTEXT])
    assert all(guessed[60:80])


@pytest.mark.parametrize(
    ("call", "mutual"),
    [
        (fingerprint("all_reduce", [torch.ones(2)], reduce_op=dist.ReduceOp.SUM), True),
        (fingerprint("barrier", []), True),
        (fingerprint("all_reduce", [torch.ones(0)], reduce_op=dist.ReduceOp.SUM), False),
        (fingerprint("broadcast", [torch.ones(2)], root=0), False),
        (fingerprint("all_to_all", [torch.ones(2)], rows=False), False),
    ],
)
def test_calls_that_a_rank_may_end_alone_are_always_compared(call, mutual: bool) -> None:
    """A root that has sent, and who has nothing to send, would go on without having heard."""
    assert call.mutual == mutual


def test_who_made_a_call_that_another_asks_about_differs_from_it() -> None:
    """It is heard by who made it, then by who asks; a rank that has not come so far has nothing to say."""
    store = dist.HashStore()
    made, asks, behind = Dissent(store), Dissent(store), Dissent(store)
    for dissent, last in ((made, 9), (asks, 6), (behind, 5)):
        dissent.made(last)
        dissent.agreed(5)
    asks.ask(7)
    assert asks.heard() is None
    assert behind.heard() is None
    assert made.heard() == 7
    assert asks.heard() == 7


def test_who_asks_about_a_call_that_all_agreed_on_was_answered() -> None:
    """A rank that came late leaves no accusation behind."""
    store = dist.HashStore()
    one, late = Dissent(store), Dissent(store)
    late.ask(7)
    one.agreed(7)
    one.made(8)
    assert one.heard() is None


def test_a_call_is_overdue_when_nothing_ended_meanwhile() -> None:
    """While calls end, nobody has to ask the store."""
    dissent = Dissent(dist.HashStore())
    assert not dissent.overdue()
    dissent.made(2)
    dissent.agreed(1)
    assert not dissent.overdue()
    assert dissent.overdue()
    dissent.agreed(2)
    assert not dissent.overdue()


def compared(sent: list[list[int]], expected: list[list[int]]) -> bool:
    rows = [[1, 1, *digests(rank, (sent[rank], expected[rank]))] for rank in range(RANKS)]
    return Comparison(torch.tensor(rows), None).same()


def test_rows_are_the_same_when_each_expects_what_it_is_sent() -> None:
    """One row more or less, or rows that come from another rank, make a difference; sums that are equal do not help."""
    draw = random.Random(0)
    for _ in range(200):
        sent = [[draw.randrange(50) for _ in range(RANKS)] for _ in range(RANKS)]
        expected = [list(column) for column in zip(*sent, strict=True)]
        assert compared(sent, expected)
        i, j = draw.sample(range(RANKS), 2)
        expected[i][j] += 1
        assert not compared(sent, expected)
        expected[j][i] -= 1
        assert not compared(sent, expected)
