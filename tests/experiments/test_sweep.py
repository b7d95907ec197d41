"""A sweep of real trials: what is best, what a killed trial and a killed sweep cost, and what stopping early saves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from shoal.observe.events import read_events
from tests.cli.project import Project, project, ranks_of
from tests.waiting import HANG_S

SWEEP = """
name = "s"
run = "run.toml"
objective = "loss/train"
[parameters]
"optimizer.lr" = [1e-6, 0.05]
"""


@pytest.fixture
def own(tmp_path: Path) -> Project:
    """A run of one rank and nine steps, and a sweep over two learning rates."""
    made = project(tmp_path)
    text = (tmp_path / "run.toml").read_text().replace("steps = 9", "steps = 9\nprocesses = 1")
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return made


@pytest.mark.stress
def test_a_killed_trial_costs_itself_and_a_second_start_trains_it_alone(own: Project) -> None:
    """The first trial's process is killed: the second is finished, the first has no value. Started again, the sweep
    trains the first on from its checkpoint, leaves the second as it is, and the higher rate is best."""
    slow = (
        (own.folder / "run.toml")
        .read_text()
        .replace('build = "own:model"', 'build = "own:model"\narguments = {hold_at = 5}')
    )
    (own.folder / "run.toml").write_text(slow)
    sweeping = own.start("sweep", "sweep.toml")
    own.wait_for_step(2, run="sweeps/s/trial-0000")
    os.kill(ranks_of(sweeping)[0], signal.SIGKILL)
    (own.folder / "go").touch()
    assert sweeping.wait(HANG_S) == 0, own.said()
    assert "trial-0000 failed with exit code 137" in own.said()
    finished = (own.folder / "sweeps/s/trial-0001/events/rank-00000.jsonl").read_bytes()

    done = own.shoal("sweep", "sweep.toml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rows"]
    assert [row["parameters"]["optimizer.lr"] for row in found] == [0.05, 1e-6]
    assert [row["state"] for row in found] == ["finished", "finished"]
    assert found[0]["mean"] < found[1]["mean"]
    assert (own.folder / "sweeps/s/trial-0001/events/rank-00000.jsonl").read_bytes() == finished
    steps = [event.step for event in read_events(own.folder / "sweeps/s/trial-0000") if "loss/train" in event.values]
    assert steps[-1] == 9
    assert steps.count(1) == 1, "the trial went on from its checkpoint"
    assert (own.folder / "sweeps/s/sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_objective_that_nobody_measures_is_one_sentence(own: Project) -> None:
    """Exit 2, when the first trial has shown it; a key that the run file does not have is refused before any starts."""
    (own.folder / "sweep.toml").write_text(SWEEP.replace("loss/train", "loss/nobody").replace("[1e-6, 0.05]", "[0.05]"))
    done = own.shoal("sweep", "sweep.toml")
    assert done.returncode == 2, done.stderr
    assert "objective = 'loss/nobody' was not measured by trial-0000" in done.stderr
    (own.folder / "sweep.toml").write_text(SWEEP.replace("optimizer.lr", "optimizer.rate").replace('"s"', '"t"'))
    done = own.shoal("sweep", "sweep.toml")
    assert done.returncode == 2
    assert "optimizer.rate" in done.stderr
    assert not list((own.folder / "sweeps/t").glob("trial-*"))


@pytest.mark.stress
def test_stopping_early_finds_the_best_of_the_grid_in_half_the_steps(own: Project) -> None:
    """Eight learning rates, the good ones first: asynchronous halving takes at most half the steps of the grid, and
    comes to the same best."""
    rates = "[0.02, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6]"
    run = (own.folder / "run.toml").read_text().replace("steps = 9", "steps = 60").replace("= 5", "= 30")
    run = run.replace('build = "own:model"', 'build = "own:model"\narguments = {pause = 0.05}').replace(
        "every_steps = 1", ""
    )
    (own.folder / "run.toml").write_text(run)
    results = {}
    for kind, search in (("grid", 'kind = "grid"'), ("asha", 'kind = "asha"\nfirst_steps = 10\nfactor = 2')):
        text = SWEEP.replace('"s"', f'"{kind}"').replace("[1e-6, 0.05]", rates) + f"[search]\n{search}\n"
        (own.folder / "sweep.toml").write_text(text)
        done = own.shoal("sweep", "sweep.toml", "--json", timeout_s=280)
        assert done.returncode == 0, done.stderr
        results[kind] = json.loads(done.stdout)
    assert results["asha"]["rows"][0]["parameters"] == results["grid"]["rows"][0]["parameters"]
    assert 2 * results["asha"]["steps"] <= results["grid"]["steps"]


@pytest.mark.stress
def test_a_bayesian_search_proposes_goes_on_and_ends_at_its_trials(own: Project) -> None:
    """Two configurations, each with two seeds, then two more by a longer search of the same name: the first are not
    trained again, proposals lie in the range, and the table has an interval over the seeds."""
    text = SWEEP.replace("[1e-6, 0.05]", "{low = 1e-6, high = 0.05, log = true}").replace(
        "[parameters]", 'seeds = [0, 1]\nparallel = 2\n[search]\nkind = "bayes"\nstartup = 2\ntrials = 2\n[parameters]'
    )
    for count in (2, 3):
        (own.folder / "sweep.toml").write_text(text.replace("trials = 2", f"trials = {count}"))
        done = own.shoal("sweep", "sweep.toml", "--json", timeout_s=180)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["rows"]
        assert [row["state"] for row in found] == ["finished"] * count
        assert all(1e-6 <= row["parameters"]["optimizer.lr"] <= 0.05 for row in found)
        assert all(row["half_interval"] is not None for row in found)
        assert done.stderr.count(" starts: ") == (4 if count == 2 else 2)
    (own.folder / "sweeps/s/proposals.json").write_text("[1")
    assert "is no JSON that can be read here" in own.shoal("sweep", "sweep.toml").stderr
