"""`shoal plan` of a run that has trained on this machine stands on the steps that it left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.config.load import dumps
from shoal.observe.events import EventWriter
from shoal.observe.facts import write_facts
from shoal.planning.answer import planned
from shoal.planning.measured_step import step_of_earlier_run
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile, run_directory

RECIPE = Path(__file__).parents[2] / "recipes/stdlib-gpt.toml"
MIXTURE = RECIPE.with_name("stdlib-moe.toml")
HOST = "here"
FACTS = {"host": HOST, "device": "cpu", "wire": "shared memory: 2 ranks on one host"}


def ran(*keys: str, step_s: float = 0.4, loads: Sequence[float] = (), recipe: Path = RECIPE, **facts: str) -> RunFile:
    """The recipe, which has trained with these keys: steps of so long, the tokens of each expert, and what its facts
    say."""
    run_file = load_run(recipe, keys)
    folder = run_directory(run_file)
    write_facts(folder, FACTS | facts)
    (folder / "run.toml").write_text(dumps(run_file), encoding="utf-8")
    with EventWriter(folder, rank=0) as writer:
        for step in range(1, 12):
            tokens = {f"moe/load/blocks.1/{expert}": load for expert, load in enumerate(loads)}
            writer.write(step, {"time/step": step_s, **tokens}, time_s=1.76e9 + step)
    return run_file


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where runs and calibrations lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def test_the_plan_as_it_ran_takes_what_it_took() -> None:
    """And the same run in another layout is planned from its steps too."""
    run_file = ran()
    step = step_of_earlier_run(run_file, host=HOST)
    assert step is not None
    found = planned(run_file, None, keep=1, measured_step=step)
    assert found.written is not None
    assert found.written.step_s == pytest.approx(0.4, rel=0.02)
    assert "calibrated on the 400 ms a step that runs/stdlib-gpt took here" in found.basis
    assert step_of_earlier_run(load_run(RECIPE, ["layout.tensor=2"]), host=HOST) == step


def test_experts_are_as_uneven_as_they_were() -> None:
    """As the run recorded, or as is said; the step that was measured is met all the same."""
    run_file = ran(loads=(5, 1, 1, 1), recipe=MIXTURE)
    step = step_of_earlier_run(run_file, host=HOST)
    assert step is not None
    assert step.expert_imbalance == 2.5
    found = planned(run_file, None, keep=1, measured_step=step)
    assert "the fullest expert with 2.5 times the mean of its layer" in found.basis
    assert found.written is not None
    assert found.written.step_s == pytest.approx(0.4, rel=0.02)
    other = planned(run_file, None, keep=1, measured_step=step, expert_imbalance=1.5)
    assert "the fullest expert with 1.5 times the mean" in other.basis


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ((), {"host": "elsewhere"}),
        ((), {"device": "cuda"}),
        ((), {"wire": "shared memory inside hosts, Gloo between: 4 ranks on 2 hosts"}),
        (("model.layers=2",), {}),
        (('precision.kind="bfloat16"',), {}),
        (('sync.kind="local"', "sync.period=4"), {}),
    ],
)
def test_a_run_that_says_nothing_of_this_one_is_left_alone(keys: tuple[str, ...], facts: dict[str, str]) -> None:
    """Of another host, on GPUs, between hosts; of another model, precision or strategy."""
    ran(*keys, **facts)
    assert step_of_earlier_run(load_run(RECIPE), host=HOST) is None


def test_a_plan_without_an_earlier_run_stands_on_what_it_stood_on() -> None:
    """No run directory, and one whose run took no step."""
    assert step_of_earlier_run(load_run(RECIPE), host=HOST) is None
    run_directory(load_run(RECIPE)).mkdir(parents=True)
    assert step_of_earlier_run(load_run(RECIPE), host=HOST) is None


def test_a_step_that_no_core_takes_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine that was stopped in the middle: the plan is made without it."""
    ran(step_s=1e-9)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    shown = CliRunner().invoke(app, ["plan", str(RECIPE)])
    assert shown.exit_code == 0, shown.output
    assert "not calibrated on the" in " ".join(shown.output.split())
