"""When a checkpoint is due: at multiples, or by Daly's formula from what was measured."""

from __future__ import annotations

import math

import pytest

from shoal.checkpoint.save import SaveReport
from shoal.cost.interval import steps_between_saves
from shoal.engine.save_policy import ByFailures, EverySteps, LastSave


class Clock:
    """Seconds that pass as a test says."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def interval(clock: Clock, **more) -> ByFailures:
    """The first of a run whose failures are expected once an hour."""
    given = {"first": 10, "step": 0, "failures": 0, "running_s": 0.0, "expected_s": 3600.0, "tell": print}
    return ByFailures(announce=lambda key, find: find(), clock=clock, **given | more)


def first_save(clock: Clock, saves: ByFailures, *, step_s: float, stall_s: float) -> int:
    """Takes steps to the first save; how many there were."""
    step = 0
    while not saves.due(step := step + 1):
        clock.now_s += step_s
    clock.now_s += step_s + stall_s
    saves.saved(step, stall_s=stall_s)
    return step


def test_multiples_are_due_and_zero_is_never() -> None:
    """The fixed interval, as it always was."""
    assert [step for step in range(1, 10) if EverySteps(3).due(step)] == [3, 6, 9]
    assert not any(EverySteps(0).due(step) for step in range(1, 10))


def test_the_interval_is_dalys() -> None:
    """From steps of 2 s, saves that hold training up for 1 s, and a failure an hour: sqrt(2 d M) - d seconds."""
    clock = Clock()
    saves = interval(clock)
    assert first_save(clock, saves, step_s=2.0, stall_s=1.0) == 10
    between_s = 3600.0 + 21.0  # what has passed counts, too
    assert saves.steps == round((math.sqrt(2 * 1.0 * between_s) - 1.0) / 2.0)
    assert not saves.due(10 + saves.steps - 1)
    assert saves.due(10 + saves.steps)


def test_more_failures_make_it_shorter() -> None:
    """Nine failures in the hours so far: nearly a third of the interval."""
    steps = []
    for failures in (0, 9):
        clock = Clock()
        saves = interval(clock, failures=failures, running_s=3600.0)
        first_save(clock, saves, step_s=1.0, stall_s=1.0)
        steps.append(saves.steps)
    assert steps[1] == pytest.approx(steps[0] / math.sqrt(10), rel=0.05)


def test_it_is_never_shorter_than_a_save_takes() -> None:
    """A save of 500 s behind training that stalls it for a millisecond: the next one would wait for it."""
    clock = Clock()
    saves = interval(clock, expected_s=60.0)
    saves.wrote(500.0)
    first_save(clock, saves, step_s=1.0, stall_s=0.001)
    assert saves.steps in (500, 501)  # a step takes a second but for rounding


def test_all_ranks_save_in_the_same_steps_though_their_clocks_differ() -> None:
    """The first rank's answer counts on every rank."""
    said: dict[str, str] = {}

    def of_first(key: str, find) -> str:
        said[key] = find()
        return said[key]

    found = []
    for announce, step_s in ((of_first, 1.0), (lambda key, find: said[key], 7.0)):
        clock = Clock()
        saves = ByFailures(
            first=10, step=0, announce=announce, failures=0, running_s=0.0, expected_s=600.0, tell=print, clock=clock
        )
        first_save(clock, saves, step_s=step_s, stall_s=0.5)
        found.append(saves.steps)
    assert found[0] == found[1]
    assert list(said) == ["save-interval/10"]


def test_a_generation_without_a_save_does_not_put_it_off() -> None:
    """The next save is due by the newest checkpoint, however often the membership changes; times are this
    generation's."""
    clock = Clock()
    saves = interval(clock, step=7, saved_step=0)
    assert not saves.due(9)
    assert saves.due(10)
    clock.now_s += 3.0
    saves.saved(10, stall_s=0.0)
    assert saves.steps == steps_between_saves(1.0, 0.0, 3600.0 + 3.0)
    assert not saves.due(11)


def test_the_distance_of_saves_is_told_once() -> None:
    """From where this start began to its first save, then from save to save; nothing where there was none."""
    clock = Clock()
    last = LastSave(clock=clock)
    last.begin(20)
    assert last.take_figures() == {}
    clock.now_s += 3.0
    last.saved(24)
    assert last.take_figures() == {"checkpoint/interval_steps": 4, "checkpoint/interval_s": 3.0}
    assert last.take_figures() == {}
    clock.now_s += 8.0
    last.saved(34)
    assert last.take_figures() == {"checkpoint/interval_steps": 10, "checkpoint/interval_s": 8.0}


def test_what_a_save_wrote_is_recorded_once() -> None:
    """With how far it was from the one before, if that was not recorded yet; and not with the step after that."""
    clock = Clock()
    last = LastSave(clock=clock)
    last.begin(0)
    clock.now_s += 5.0
    last.saved(10)
    report = SaveReport(10, 1.5, bytes_written=70, bytes_reused=10, committed=True, error=None, state_bytes=100)
    last.wrote(report)
    assert last.take_figures() == {
        "checkpoint/interval_steps": 10,
        "checkpoint/interval_s": 5.0,
        "checkpoint/saved_step": 10,
        "checkpoint/save_s": 1.5,
        "checkpoint/state_bytes": 100,
        "checkpoint/written_bytes": 70,
        "checkpoint/reused_bytes": 10,
    }
    assert last.take_figures() == {}
