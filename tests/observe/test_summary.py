"""The head of the page states what the events hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shoal import units
from shoal.launcher.lock import RunLock
from shoal.observe.events import EventWriter, groups, read_events
from shoal.observe.facts import number_of, write_facts
from shoal.observe.goodput import DETECTING, RESTARTING, goodput_of
from shoal.observe.record import read_record
from shoal.observe.sink import Ending, RunStart, write_ending
from shoal.observe.status import Status
from shoal.observe.summary import Summary, _goodput, key_numbers, summarize
from shoal.page.lead import Lead
from tests.observe.synthetic import START_S, write_run


def summary_of(directory: Path) -> Summary:
    return summarize(read_record(directory))


def test_the_numbers_of_a_finished_run(tmp_path: Path) -> None:
    """Losses, pace, time, skipped steps: each as it was written."""
    write_run(tmp_path)
    found = summary_of(tmp_path)
    assert (found.state, found.badge, found.step, found.total_steps) == ("finished", "finished", 40, 40)
    assert found.last_train_loss == pytest.approx(2.0 + 3.0 * math.exp(-4))
    assert (found.held_out_loss, found.accuracy) == (2.0, 0.975)
    assert (found.throughput, found.throughput_unit) == (20_480.0, "tokens/s")
    assert found.step_s == pytest.approx(0.1)
    assert found.time_s == pytest.approx(39.1)
    assert found.skipped_steps == [7]


def test_a_run_short_of_its_last_step_says_how_it_is(tmp_path: Path) -> None:
    """Running while somebody holds the lock of its directory, else killed; or as it said itself when it ended."""
    write_run(tmp_path, steps=25, planned=40)
    assert summary_of(tmp_path).badge == "killed at step 25 of 40"
    with RunLock(tmp_path):
        assert summary_of(tmp_path).badge == "running at step 25 of 40"
        write_ending(tmp_path, Ending("stopped"))
        assert summary_of(tmp_path).badge == "stopped at step 25 of 40"
    write_ending(tmp_path, Ending("failed", "why", rank=1, exit_code=1))
    assert summary_of(tmp_path).badge == "failed at step 25 of 40"


def test_a_run_that_fails_after_its_last_step_failed(tmp_path: Path) -> None:
    """The checkpoint of the last step could not be written: every step is done, and the run is not finished."""
    write_run(tmp_path)
    write_ending(tmp_path, Ending("failed", "no space", exit_code=3))
    assert summary_of(tmp_path).badge == "failed at step 40 of 40"


def test_goodput_and_exposed_communication_are_shares_of_the_time(tmp_path: Path) -> None:
    """39 steps of 99 ms that changed weights (step 7 did not) in 39.1 s; 20 ms of each 100 ms step exposed."""
    write_run(tmp_path)
    found = summary_of(tmp_path)
    assert found.exposed_share == pytest.approx(0.2)
    assert found.goodput == pytest.approx(39 * 0.099 / 39.1)
    write_run(again := tmp_path / "again", stop_at=20)
    resumed = summary_of(again).goodput
    assert resumed is not None
    assert resumed < 0.01  # a thousand seconds away


def test_the_terminal_the_report_and_the_page_have_one_goodput(tmp_path: Path) -> None:
    """Of a run that was resumed after a thousand seconds; and a start that takes no step, because all are taken,
    changes nothing of it."""
    write_run(tmp_path, stop_at=20)
    events = read_events(tmp_path)
    first, second = groups(events)
    lead = Lead()
    for event in events:
        lead.add(event)
    run = RunStart(name="run", total_steps=40, first_step=16, generation=1)
    status = Status(run, earlier=goodput_of(first))
    status.update(
        15, {"membership/replicas": 2.0}, time_s=second[0].time_s - 0.2
    )  # of no step, as elastic runs have it
    for event in second:
        status.update(event.step, event.values, time_s=event.time_s)
    fall, report = lead.waterfall(), summary_of(tmp_path).goodput
    assert fall is not None
    assert report is not None
    assert report == pytest.approx(fall.trained_s / fall.whole_s)
    assert f"goodput {units.percent(report)}" in status.summary(Ending("finished"))
    with EventWriter(tmp_path, rank=0, generation=2) as writer:
        writer.resume(40, time_s=START_S + 1e6)
    assert summary_of(tmp_path).goodput == report


def test_a_resumed_run_counts_its_last_life(tmp_path: Path) -> None:
    """Steps computed twice count once, and the restart is listed."""
    write_run(tmp_path, stop_at=20)
    found = summary_of(tmp_path)
    assert [(one.first_step, one.last_step, one.repeated_steps) for one in found.attempts] == [(1, 20, 0), (16, 40, 5)]
    assert found.state == "finished"


def test_facts_of_any_type_are_survived(tmp_path: Path) -> None:
    """Numbers that are texts, lists for tables: what is of the wrong type was not measured."""
    write_run(tmp_path)
    write_facts(tmp_path, {"baseline": [1], "loss_unit": 3, "evaluation": "good", "state": {}, "world": "two"})
    found = summary_of(tmp_path)
    assert (found.baseline_loss, found.loss_unit, found.held_out_loss) == (None, "", 2.0)
    for value in ("2", True, None, math.nan, math.inf, 10**400, []):
        assert number_of(value) is None


def test_what_changes_of_the_membership_cost_is_said_beside_the_goodput(tmp_path: Path) -> None:
    """The sum over the generations of an elastic run; a run with fixed ranks has none."""
    write_run(tmp_path)
    assert (summary_of(tmp_path).detecting_s, summary_of(tmp_path).restarting_s) == (0.0, 0.0)
    with (tmp_path / "events/rank-00000.jsonl").open("a") as events:
        for detecting_s, restarting_s in ((0.5, 2.0), (0.0, 1.0)):
            values = {DETECTING: detecting_s, RESTARTING: restarting_s}
            events.write(json.dumps({"step": 40, "time": 2e9, "generation": 0, "values": values}) + "\n")
    found = summary_of(tmp_path)
    assert (found.detecting_s, found.restarting_s) == (0.5, 3.0)
    entry = _goodput(found)
    assert entry is not None
    assert "500 ms until losses were known, 3.0 s to the next steps" in entry[2]


def test_the_head_says_what_twice_the_batch_would_save(tmp_path: Path) -> None:
    """With a noise scale of 48 and steps of 16, 2.5 / 4 of the steps (arXiv:1812.06162, eq. 2.7)."""
    write_run(tmp_path)
    with (tmp_path / "run.toml").open("a") as file:
        file.write("\n[batch]\nglobal_samples = 16\n")
    with EventWriter(tmp_path, rank=0, generation=1) as writer:
        writer.write(41, {"loss/train": 1.0, "noise/scale": 48.0}, time_s=START_S + 50)
        writer.write(42, {"loss/train": 1.0, "noise/scale": math.nan}, time_s=START_S + 51)
    record = read_record(tmp_path)
    text = key_numbers(record, summarize(record))
    assert "critical batch</dt><dd>48<small>" in text
    assert f"a batch of 32 would take {units.percent(2.5 / 4)} of the steps" in text
