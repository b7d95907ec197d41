"""The head of the page states what the events hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.observe.facts import write_facts
from shoal.observe.record import read_record
from shoal.observe.summary import Summary, number_of, summarize
from tests.observe.synthetic import write_run


def summary_of(directory: Path) -> Summary:
    return summarize(read_record(directory))


def test_the_numbers_of_a_finished_run(tmp_path: Path) -> None:
    """Losses, pace, time, skipped steps: each as it was written."""
    write_run(tmp_path)
    found = summary_of(tmp_path)
    assert (found.state, found.step, found.total_steps, found.finished) == ("finished", 40, 40, True)
    assert found.last_train_loss == pytest.approx(2.0 + 3.0 * math.exp(-4))
    assert (found.held_out_loss, found.accuracy) == (2.0, 0.975)
    assert (found.throughput, found.throughput_unit) == (20_480.0, "tokens/s")
    assert found.step_s == pytest.approx(0.1)
    assert found.time_s == pytest.approx(39.1)
    assert found.skipped_steps == [7]


def test_a_run_that_is_not_done_says_where_it_is(tmp_path: Path) -> None:
    """Short of its last step a run is at a step, with the state that was written down for it."""
    write_run(tmp_path, steps=25, planned=40)
    assert summary_of(tmp_path).state == "step 25 of 40"
    write_facts(tmp_path, {"state": "stopped"})
    assert summary_of(tmp_path).state == "stopped at step 25 of 40"


def test_a_resumed_run_counts_its_last_life(tmp_path: Path) -> None:
    """Steps computed twice count once, and the restart is listed."""
    write_run(tmp_path, stop_at=20)
    found = summary_of(tmp_path)
    assert [(life.first_step, life.last_step, life.repeated_steps) for life in found.lives] == [(1, 20, 0), (16, 40, 5)]
    assert found.finished


def test_facts_of_any_type_are_survived(tmp_path: Path) -> None:
    """Numbers that are texts, lists for tables: what is of the wrong type was not measured."""
    write_run(tmp_path)
    write_facts(tmp_path, {"baseline": [1], "loss_unit": 3, "evaluation": "good", "state": {}, "world": "two"})
    found = summary_of(tmp_path)
    assert (found.baseline_loss, found.loss_unit, found.held_out_loss) == (None, "", 2.0)
    for value in ("2", True, None, math.nan, math.inf, 10**400, []):
        assert number_of(value) is None
