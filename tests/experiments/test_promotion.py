"""Which stopped trial of a sweep goes on, without training any."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.experiments.search import ASHA, Range, SweepFile, trials
from shoal.experiments.sweep import Decision, Sweep, _Running, is_recorded
from shoal.experiments.trial_command import train_alone
from shoal.observe.events import Event, EventWriter
from shoal.observe.facts import write_facts


def sweep_of(folder: Path, decisions: dict[str, Decision]) -> Sweep:
    rates: dict[str, list[Any] | Range] = {"optimizer.lr": [0.1, 0.2, 0.3, 0.4]}
    file = SweepFile("s", "run.toml", "loss/train", rates, ASHA(first_steps=10, factor=2))
    return Sweep(file, folder / "run.toml", folder, lambda line: None, decisions)


def test_a_trial_goes_on_when_it_is_among_the_best_of_more(tmp_path: Path) -> None:
    """The second of two is not among the best half; the second of four is, until it has gone on."""
    decisions = {"trial-0000": Decision({10: 1.0}), "trial-0001": Decision({10: 2.0}, stopped_at=10)}
    sweep = sweep_of(tmp_path, decisions)
    every = trials(sweep.file)
    assert sweep._promoted(every) is None
    decisions["trial-0002"] = Decision({10: 3.0}, stopped_at=10)
    assert sweep._promoted(every) is None
    decisions["trial-0003"] = Decision({10: None}, stopped_at=10)
    found = sweep._promoted(every)
    assert found is not None
    assert found.name == "trial-0001"
    sweep._let_go_on(found)
    assert sweep._promoted(every) is None
    assert decisions["trial-0001"].stopped_at is None


def test_a_rung_waits_for_the_evaluation_of_its_step() -> None:
    """A trial is judged by the value at the rung, not by one before it, nor refused because it is still evaluating."""
    events = [Event(step, float(step), values={"loss/train": 1.0}) for step in range(1, 11)]
    events.insert(5, Event(5, 5.5, values={"loss/eval": 2.0}))
    assert not is_recorded(events, "loss/eval", 10)
    assert is_recorded(events, "loss/train", 10)
    assert is_recorded([*events, Event(10, 10.5, values={"loss/eval": 1.0})], "loss/eval", 10)
    assert is_recorded([*events, Event(11, 11.0, values={"loss/train": 1.0})], "loss/eval", 10)
    assert not is_recorded([], "loss/eval", 10)


@pytest.mark.parametrize(("state", "outcome"), [("finished", "finished"), ("stopped", "stopped early")])
def test_a_trial_that_was_stopped_too_late_has_finished(tmp_path: Path, state: str, outcome: str) -> None:
    """It is no candidate to go on, and stands among those that finished."""
    sweep = sweep_of(tmp_path, {"trial-0000": Decision({10: 1.0}, stopped_at=10)})
    trial = trials(sweep.file)[0]
    write_facts(tmp_path / trial.name, {"state": state, "failure": {"cause": "x", "exit_code": 75}})
    with EventWriter(tmp_path / trial.name, rank=0) as writer:
        writer.write(40, {"loss/train": 1.0}, time_s=1.0)
    process = subprocess.Popen(["true"])
    process.wait()
    sweep._running.append(_Running(trial, 0, process))
    assert sweep._reap() == [0]
    assert sweep.outcome(trial).state == outcome


def test_the_highest_rung_comes_first(tmp_path: Path) -> None:
    decisions = {
        "trial-0000": Decision({10: 1.0, 20: 5.0}, stopped_at=20),
        "trial-0001": Decision({10: 2.0, 20: 4.0}),
        "trial-0002": Decision({10: 0.5}, stopped_at=10),
    }
    sweep = sweep_of(tmp_path, decisions)
    every = trials(sweep.file)
    assert [t.name for t in every if t is sweep._promoted(every)] == ["trial-0002"]
    decisions["trial-0000"] = Decision({10: 1.0, 20: 3.0}, stopped_at=20)
    found = sweep._promoted(every)
    assert found is not None
    assert found.name == "trial-0000"


def test_a_single_task_is_refused_where_trials_are_judged_together(tmp_path: Path) -> None:
    """ASHA decides between trials; and a grid of four has no fifth."""
    place = (tmp_path / "run.toml", tmp_path)
    with pytest.raises(UsageError, match="--via"):
        train_alone(sweep_of(tmp_path, {}).file, 0, *place)
    rates: dict[str, list[Any] | Range] = {"optimizer.lr": [0.1, 0.2, 0.3, 0.4]}
    with pytest.raises(UsageError, match=r"there is no trial 4: .*--array=0-3"):
        train_alone(SweepFile("s", "run.toml", "loss/train", rates), 4, *place)
