"""Where nothing was measured on a machine, a plan tries the model's own step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.planning.answer import planned, predictor_of
from shoal.planning.operators import cores
from shoal.planning.plan_file import written_plan
from shoal.planning.tried_step import tried_step
from shoal.runfile.load import load_run

ROOT = Path(__file__).parents[2]
SMALL = ("model.layers=2", "model.width=64", "run.processes=1")
BRIEF_S = 0.05
NEAR = 0.02
"""What calibrating leaves, of a step."""


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("recipe", ["stdlib-gpt", "stdlib-moe"])
def test_the_prediction_of_what_was_tried_is_what_it_took(recipe: str) -> None:
    """Of the step on one rank; the plan is calibrated on it, says so, and has an interval."""
    run_file = load_run(ROOT / f"recipes/{recipe}.toml", SMALL)
    step = tried_step(run_file, tried_s=BRIEF_S)
    assert step is not None
    result = planned(run_file, None, keep=1, measured_step=step)
    assert "measured just now" in result.basis
    assert result.evidence != "data sheet"
    alone = written_plan(step.run_file, result.predictor.cluster)
    assert result.predictor.predict(alone).step_s == pytest.approx(step.step_s, rel=NEAR)


def test_trying_leaves_no_trace() -> None:
    """Random numbers and threads are as before."""
    run_file = load_run(ROOT / "recipes/stdlib-gpt.toml", SMALL)
    before = torch.get_rng_state(), torch.get_num_threads()
    tried_step(run_file, tried_s=BRIEF_S)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


@pytest.mark.parametrize(
    "keys", [[f"run.processes={2 * cores()}"], ['run.device="cuda"'], ["model.width=4096", "model.heads=32"]]
)
def test_what_says_nothing_or_takes_long_is_not_tried(keys: list[str]) -> None:
    """More ranks than cores, GPUs, a model of a hundred million parameters."""
    assert tried_step(load_run(ROOT / "recipes/stdlib-gpt.toml", [*SMALL, *keys]), tried_s=BRIEF_S) is None


def test_a_plan_that_was_asked_for_on_cores_tries() -> None:
    """Predicted from assumed rates, a core that is twice as fast would be off by half."""
    run_file = load_run(ROOT / "recipes/stdlib-gpt.toml", SMALL)
    assumed = predictor_of(run_file, None)
    step = tried_step(run_file, tried_s=BRIEF_S)
    assert step is not None
    own = planned(run_file, None, keep=1, measured_step=step).predictor
    plan = written_plan(run_file, assumed.cluster)
    ratio = own.predict(plan).step_s / assumed.predict(plan).step_s
    assert 0.01 < ratio < 100
    assert abs(ratio - 1) > 1e-6
