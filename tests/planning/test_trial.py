"""Plans that are tried: real short runs, in order of what was measured."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import EnvironmentFault, UsageError
from shoal.observe.events import EventWriter
from shoal.observe.terminal import PlainProgressBar, ProgressBar
from shoal.planner.predict.predictor import Prediction
from shoal.planning import trial
from shoal.planning.answer import planned
from shoal.planning.trial import check_here, tried
from shoal.runfile.load import load_run
from shoal.topology.cluster_file import known_cluster

RUN = """
[run]
name = "tiny"
steps = 500
processes = 2
[model]
kind = "gpt"
width = 32
layers = 2
heads = 2
[data]
kind = "tokens"
path = "{path}"
[batch]
global_samples = 8
sequence = 32
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a tiny GPT, whose predictions are remembered in a folder of the test."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    tokens = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tofile(tokens)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(path=tokens))
    return path


def _best(run_file: Path, number: int) -> list[Prediction]:
    return planned(load_run(run_file, ()), None, keep=number).found.best


@pytest.mark.stress
def test_plans_are_run_and_ordered_by_what_they_took(run_file: Path) -> None:
    """Both have seconds of their own, in order; nothing is left where the run file lies."""
    before, said = sorted(run_file.parent.iterdir()), io.StringIO()
    bar = PlainProgressBar(said)
    trials = tried(run_file, _best(run_file, 2), overrides=(), environ=os.environ, bar=bar, turns=1)
    measured = [one.measured_s for one in trials]
    assert all(seconds is not None and seconds > 0 for seconds in measured)
    assert measured == sorted(measured, key=lambda seconds: seconds or 0.0)
    assert len(said.getvalue().splitlines()) == len({one.prediction.plan for one in trials}) == 2
    assert [path for path in sorted(run_file.parent.iterdir()) if path.name != "cache"] == before


@pytest.mark.parametrize("schedule", ["begin = 50\nend = 150", "begin = 400", 'shape = "one_shot"\nbegin = 200'])
def test_masks_of_a_later_step_are_there_before_the_steps_that_are_timed(run_file: Path, schedule: str) -> None:
    """Also where the run's own would come after the trial, which the rules refuse."""
    masks = f'[sparsity]\nkind = "magnitude"\ndensity = 0.5\n[sparsity.schedule]\n{schedule}\n'
    path = run_file.with_name("short.toml")
    trial._write_short(path, f'{run_file.read_text()}{masks}[checkpoint]\nremote = "memory://store"\n')
    short = load_run(path, (f"run.steps={trial.WARM_UP + trial.STEPS}",))
    assert short.sparsity is not None
    assert (short.sparsity.schedule.end or 99) < trial.WARM_UP
    assert short.checkpoint.remote is None


def test_a_plan_that_fails_comes_last_with_its_reason(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again, and the others still are: here, runs that are played by their events."""
    runs: list[str] = []

    class Played:
        """`subprocess.Popen` of a training whose first plan fails."""

        def __init__(self, command: list[str], **_: object) -> None:
            directory = next(Path(word.partition("=")[2]) for word in command if word.startswith("run.directory="))
            runs.append(directory.name)
            self.returncode = 5 if directory.name.startswith("plan-0") else 0
            with EventWriter(directory, rank=0) as events:
                for step in range(trial.WARM_UP + 3):
                    events.write(step + 1, {"time/step": 1.0 if step < trial.WARM_UP else 0.25}, time_s=float(step))

        def __enter__(self) -> Played:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was opened."""

        def communicate(self) -> tuple[None, str]:
            return None, "rank 1 of 2 failed:\nOutOfMemory: 3 GiB"

    monkeypatch.setattr(trial.subprocess, "Popen", Played)
    first, last = tried(run_file, _best(run_file, 2), overrides=(), environ=os.environ, bar=ProgressBar())
    assert (first.measured_s, first.failure) == (0.25, "")
    assert last.measured_s is None
    assert "exit code 5" in last.failure
    assert "OutOfMemory: 3 GiB" in last.failure
    assert [name[:6] for name in runs] == ["plan-0", "plan-1", "plan-1"]


@pytest.mark.slow
def test_where_nothing_runs_the_first_reason_is_told(run_file: Path) -> None:
    """A run file whose tokens are gone."""
    best = _best(run_file, 1)
    (run_file.parent / "tokens.bin").unlink()
    with pytest.raises(EnvironmentFault, match=r"tokens\.bin"):
        tried(run_file, best, overrides=(), environ=os.environ, bar=ProgressBar(), turns=1)


def test_another_machine_cannot_be_tried_here() -> None:
    """Eight GPUs that are not there, or several nodes."""
    for nodes in (1, 2):
        with pytest.raises(UsageError, match="leave out --measure"):
            check_here(known_cluster("dgx-a100-80gb", nodes=nodes), {"CUDA_VISIBLE_DEVICES": ""})
