"""The line of a run says where it stands, and fits the terminal."""

from __future__ import annotations

import math

import pytest

from shoal.observe.sink import Ending, RunStart
from shoal.observe.status import Status, packed
from tests.observe.streams import VALUES, Clock
from tests.observe.synthetic import START_S


def status_of(clock: Clock, *, steps: int = 100, first_step: int = 1, epoch_samples: int | None = None) -> Status:
    run = RunStart(name="run", total_steps=steps, first_step=first_step, epoch_samples=epoch_samples)
    return Status(run, clock=clock)


def test_time_left_is_the_pace_of_this_attempt() -> None:
    """Resumed after step 50 of 100, 10 steps in 20 s leave 40 steps and 80 s; before two steps nothing is claimed."""
    clock = Clock()
    status = status_of(clock, first_step=51)
    status.update(51, VALUES, time_s=START_S)
    assert status.left_s() is None
    clock.now_s = 20.0
    status.update(60, VALUES, time_s=START_S)
    assert status.left_s() == pytest.approx(80.0)
    assert status.position() == ["step 60/100", "1:20 left", "0:20 elapsed"]


def test_an_activity_stands_in_the_place_of_the_time_left() -> None:
    """While the run evaluates it says so, and how long it has run."""
    clock = Clock()
    status = status_of(clock)
    status.update(50, VALUES, time_s=START_S)
    status.activity = "evaluating"
    clock.now_s = 65.0
    assert status.position() == ["step 50/100", "evaluating", "1:05 elapsed"]


def test_waiting_for_data_is_said_when_it_matters() -> None:
    """Below one percent of the step it is left out; exposed sync is always said."""
    status = status_of(Clock())
    status.update(1, VALUES, time_s=START_S)
    assert "sync 5.0 %" in status.measurements()
    assert not any(part.startswith("data wait") for part in status.measurements())
    status.update(2, VALUES | {"time/data": 0.02}, time_s=START_S)
    assert "data wait 10 %" in status.measurements()


def test_an_evaluation_and_a_save_keep_the_measurements_of_the_step() -> None:
    """The held-out loss appears beside the training loss, and stays while later steps do not have it. What the last
    save took is recorded after the last step, whose figures stay on the terminal.
    """
    status = status_of(Clock())
    status.update(1, VALUES, time_s=START_S)
    status.update(1, {"loss/eval": 2.5}, time_s=START_S)
    assert status.measurements()[:2] == ["loss 2.250", "held out 2.500"]
    status.update(1, {"checkpoint/saved_step": 1.0, "checkpoint/save_s": 0.2}, time_s=START_S)
    assert status.measurements()[:2] == ["loss 2.250", "held out 2.500"]
    status.update(2, VALUES | {"loss/train": 2.0}, time_s=START_S)
    assert status.measurements()[:2] == ["loss 2.000", "held out 2.500"]


def test_step_and_figures_are_of_one_step() -> None:
    """An evaluation that is told before its step is over waits for it, in the live line too."""
    status = status_of(Clock(), epoch_samples=100)
    status.update(1, VALUES, time_s=START_S)
    status.update(2, {"loss/eval": 2.5}, time_s=START_S)
    assert status.position()[0].startswith("step 1/")
    assert {"epoch 1.50", "held out 2.500"} <= set(status.measurements())
    status.update(2, VALUES | {"samples/consumed": 200.0}, time_s=START_S)
    assert status.position()[0].startswith("step 2/")
    assert "epoch 2.00" in status.measurements()


def test_epoch_and_memory_are_shown() -> None:
    """150 samples of 100 are epoch 1.50; memory in powers of 1024. Without an end to the data there is no epoch."""
    status = status_of(Clock(), epoch_samples=100)
    status.update(1, VALUES, time_s=START_S)
    assert {"epoch 1.50", "memory 300 MiB"} <= set(status.measurements())
    endless = status_of(Clock())
    endless.update(1, VALUES, time_s=START_S)
    assert not any(part.startswith("epoch") for part in endless.measurements())


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("steps", [100, 1_000_000])
def test_the_lines_fit_their_columns(columns: int, steps: int) -> None:
    """No line is longer than the terminal, and at 40 columns and more the step and the time left are whole."""
    clock = Clock()
    status = status_of(clock, steps=steps, epoch_samples=1000)
    status.update(60, VALUES | {"loss/eval": 1.0}, time_s=START_S)
    clock.now_s = 3600.0
    title, first, below = status.lines(columns)
    cells = status.bar_cells(columns, len(title) + len(first))
    assert len(title) + cells + (2 if cells else 0) + len(first) <= columns
    assert all(len(line) <= columns for line in below)
    if columns >= 40:
        assert first.startswith(f"step 60/{steps}  ")
        assert " left" in first


def test_parts_are_left_out_whole_and_in_order() -> None:
    """What has no room is left out with all that follows it, never cut, except a single part wider than a line."""
    assert packed(["aaaa", "bbbb", "cc"], 10, 1) == ["aaaa  bbbb"]
    assert packed(["aaaa", "bbbb", "cc"], 10, 2) == ["aaaa  bbbb", "cc"]
    assert packed(["aaaaaaaaaaaa", "b"], 10, 1) == ["aaaaaaaaaa"]


def test_the_summary_is_the_sum_of_the_steps() -> None:
    """Ten steps of 0.2 s in 4 s: mean rate and exposed share of the steps, goodput of the time since the first step.

    A step whose loss is not finite changed no weight, and is no good time.
    """
    clock = Clock()
    status = status_of(clock, steps=10)
    for step in range(1, 11):
        values = VALUES | ({"loss/train": math.nan} if step == 5 else {})
        status.update(step, values, time_s=START_S + 0.4 * step)
    clock.now_s = 4.0
    summary = status.summary(Ending("finished"))
    # 9 steps of 0.2 s less 1 ms of waiting for data, of 9 * 0.4 s to the last step's end and the first step's 0.2 s
    assert summary == (
        "finished: 10 steps in 4.0 s, 200 ms a step, 14.2k tokens/s, exposed communication 5.0 %, goodput 47 %"
    )


def test_a_run_that_ends_early_says_where() -> None:
    """State and step of a run that did not reach its last; without a step there is no rate to claim."""
    status = status_of(Clock())
    assert status.summary(Ending("failed")) == "failed at step 0 of 100: 0 steps in 0 s"
    status.update(7, VALUES, time_s=START_S)
    assert status.summary(Ending("stopped")).startswith("stopped at step 7 of 100: 1 step in")


def test_the_critical_batch_stays_until_it_is_measured_again() -> None:
    """It is not measured in every step, and not a number where the signal is lost in noise."""
    status = status_of(Clock())
    status.update(1, VALUES, time_s=START_S)
    assert not any("critical" in part for part in status.measurements())
    for step, more in enumerate(({"noise/scale": 1236.6}, {}, {"noise/scale": math.nan}), start=2):
        status.update(step, VALUES | more, time_s=START_S)
        assert "critical batch 1.24k" in status.measurements()
