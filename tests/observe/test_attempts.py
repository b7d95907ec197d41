"""Restarts are read off the events, however they show."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shoal.observe.events import Event, attempts, failures, training_time_s


def steps(numbers: Iterable[int], *, start_s: float, generation: int = 0) -> list[Event]:
    return [
        Event(step=number, time_s=start_s + index, generation=generation, values={"loss/train": 1.0})
        for index, number in enumerate(numbers)
    ]


def test_one_start_is_one_attempt() -> None:
    """Ascending steps, with evaluations beside them, are a single start."""
    events = steps(range(1, 6), start_s=10.0)
    events.insert(3, Event(step=3, time_s=12.5, values={"loss/eval": 1.0}))
    (attempt,) = attempts(events)
    assert (attempt.first_step, attempt.last_step, attempt.repeated_steps) == (1, 5, 0)
    assert attempts([]) == []


@pytest.mark.parametrize(
    ("later", "repeated"),
    [
        (steps(range(4, 8), start_s=50.0), 2),  # the step goes back
        (steps(range(5, 8), start_s=50.0), 1),  # the same step again
        (steps(range(6, 8), start_s=50.0, generation=1), 0),  # a new generation goes on where the old one ended
        ([Event(step=5, time_s=50.0), *steps(range(6, 8), start_s=51.0)], 0),  # the writer says so
        ([Event(step=3, time_s=50.0), *steps(range(4, 8), start_s=51.0)], 2),
    ],
)
def test_a_restart_is_seen(later: list[Event], repeated: int) -> None:
    """Each sign of a new attempt gives a second one, with the steps that were computed again and the time away."""
    first, second = attempts(steps(range(1, 6), start_s=10.0) + later)
    assert (first.first_step, first.last_step) == (1, 5)
    assert (second.first_step, second.last_step) == (6 - repeated, 7)
    assert second.repeated_steps == repeated
    assert second.away_s == pytest.approx(36.0)


def test_time_away_is_no_training_time() -> None:
    """Only the time between a life's first and last line counts, and one first step a life."""
    found = attempts(steps(range(1, 6), start_s=10.0) + steps(range(4, 8), start_s=1000.0))
    assert training_time_s(found, first_step_s=1.0) == pytest.approx(5.0 + 4.0)


def test_ends_after_which_steps_were_taken_again_are_failures() -> None:
    """Neither a planned stop nor a generation that goes on with the state is one; the last end counts by where the run
    resumes."""
    planned = steps(range(1, 6), start_s=10.0) + steps(range(6, 8), start_s=50.0, generation=1)
    assert failures(attempts(planned), resumed=7) == 0
    assert failures(attempts(planned), resumed=5) == 1
    crashed = planned + steps(range(6, 9), start_s=90.0, generation=2)
    assert failures(attempts(crashed), resumed=8) == 1
    assert failures([], resumed=0) == 0
