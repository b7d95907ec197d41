"""Where nothing was measured on a machine, a plan tries the model's own step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.launcher.devices import cores
from shoal.models.config import GPTConfig
from shoal.planning.answer import planned
from shoal.planning.plan_file import written_plan
from shoal.planning.tried_step import tried_step
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

ROOT = Path(__file__).parents[2]
GPT = ("stdlib-gpt.toml", "model.layers=2", "model.width=64", f"run.processes={cores()}")
DIGITS = ("digits.toml", f"run.processes={cores()}")
BRIEF_S = 0.05
NEAR = 0.02
"""What calibrating leaves, of a step."""


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def run_of(recipe: str, *keys: str) -> RunFile:
    return load_run(ROOT / "recipes" / recipe, keys)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [GPT, DIGITS])
def test_the_prediction_of_what_was_tried_is_what_it_took(recipe: tuple[str, ...]) -> None:
    """Of a model by closed forms, and of one by its trace. The plan is calibrated on the step of one rank with one
    thread, says so, and has an interval."""
    run_file = run_of(*recipe)
    step = tried_step(run_file, tried_s=BRIEF_S)
    assert step is not None
    result = planned(run_file, None, keep=1, measured_step=step)
    assert "measured just now" in result.basis
    assert result.evidence != "data sheet"
    alone = result.predictor.on(result.predictor.cluster.with_devices(1))
    plan = written_plan(step.run_file, alone.cluster)
    if isinstance(run_file.model, GPTConfig):  # a trace is of the planned batch
        assert alone.bill(plan).total == pytest.approx(step.step_s, rel=NEAR)


def test_trying_leaves_no_trace() -> None:
    """Random numbers and threads are as before."""
    run_file = run_of(*GPT)
    before = torch.get_rng_state(), torch.get_num_threads()
    tried_step(run_file, tried_s=BRIEF_S)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


@pytest.mark.parametrize(
    "keys", [[f"run.processes={2 * cores()}"], ['run.device="cuda"'], ["model.width=4096", "model.heads=32"]]
)
def test_what_says_nothing_or_takes_long_is_not_tried(keys: list[str]) -> None:
    """More ranks than cores, GPUs, a model of a hundred million parameters."""
    assert tried_step(run_of(*GPT, *keys), tried_s=BRIEF_S) is None
