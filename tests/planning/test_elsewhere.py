"""A run that was measured here, on machines that are not: what follows from its step, and what from data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config.load import dumps
from shoal.errors import UsageError
from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts
from shoal.observe.prediction import STEP
from shoal.planning.elsewhere import as_record, as_text, elsewhere, measured_run
from shoal.runfile.load import load_run
from tests.planner.calibrations import calibration

RECIPE = Path(__file__).parents[2] / "recipes/stdlib-gpt.toml"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that is calibrated; where its runs lie."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/calibration.toml").write_text(dumps(calibration()))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def _took(folder: Path, step_s: float, *, predicted_s: float | None = None) -> Path:
    """The directory of a run whose steps took so long."""
    if predicted_s is not None:
        write_facts(folder, {STEP: predicted_s})
    with EventWriter(folder, rank=0) as writer:
        for step in range(1, 12):
            writer.write(step, {"time/step": step_s}, time_s=1.76e9 + step)
    return folder


def test_more_cores_take_less_and_in_proportion_to_the_step_measured_here(machine: Path) -> None:
    """A run that took twice as long here takes twice as long on more such cores; GPUs are the same for both."""
    run_file = load_run(RECIPE)
    fast, slow = (
        elsewhere(measured_run(run_file, _took(machine / name, step_s))) for name, step_s in (("a", 0.2), ("b", 0.4))
    )
    assert [one.where for one in fast] == ["4 cores like these", "16 cores like these", "1 A100 80 GB", "8 H100"]
    ratios = [b.prediction.step_s / a.prediction.step_s for a, b in zip(fast, slow, strict=True)]
    assert ratios == pytest.approx([2, 2, 1, 1], rel=0.02)
    assert 0.2 > fast[0].prediction.step_s > fast[1].prediction.step_s
    assert ["data sheets" in one.basis for one in fast] == [False, False, True, True]


def test_what_was_predicted_stands_beside_what_was_measured(machine: Path) -> None:
    """In words, and as numbers; nothing claims an interval."""
    run = measured_run(load_run(RECIPE), _took(machine / "a", 0.2, predicted_s=0.18))
    found = elsewhere(run)
    assert as_text(run, found).startswith("Here a step took 200 ms; 180 ms were predicted before it began (-10 %).\n")
    assert as_record(run, found)["predicted_s"] == 0.18
    assert "%" not in as_text(run, found).partition("\n")[2]


def test_a_run_that_was_not_predicted_says_what_it_took(machine: Path) -> None:
    """And no more."""
    run = measured_run(load_run(RECIPE), _took(machine / "a", 0.2))
    assert as_text(run, []).startswith("Here a step took 200 ms.\n")


def test_a_start_of_a_finished_run_takes_nothing_away(machine: Path) -> None:
    """It has nothing to train, and measures nothing: the steps before it stand."""
    folder = _took(machine / "a", 0.2)
    with EventWriter(folder, rank=0) as writer:
        writer.write(11, {}, time_s=1.76e9 + 60)
    assert measured_run(load_run(RECIPE), folder).step_s == 0.2


def test_a_directory_without_steps_is_refused(machine: Path) -> None:
    """As one that does not exist."""
    with pytest.raises(UsageError, match="no measured steps are there"):
        measured_run(load_run(RECIPE), machine / "nothing")
