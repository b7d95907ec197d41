"""One measured step calibrates a cluster: it is met, others follow it, and what no machine can be is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shoal.errors import UsageError
from shoal.models.config import MoEConfig
from shoal.planning.answer import planned, predictor_of
from shoal.planning.measured_step import MeasuredStep, calibrated
from shoal.planning.plan_file import written_plan
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile

RECIPE = Path(__file__).parents[2] / "recipes/stdlib-gpt.toml"


def _run(*keys: str) -> RunFile:
    return load_run(RECIPE, keys)


def _cluster(folder: Path, machine: str = "dgx-h100", nodes: int = 1) -> Path:
    path = folder / f"{machine}-{nodes}.toml"
    path.write_text(f'[cluster]\nmachine = "{machine}"\nnodes = {nodes}\n', encoding="utf-8")
    return path


@pytest.mark.parametrize("slower", [1.2, 2.0])
def test_the_measured_step_is_met_and_other_plans_get_slower_with_it(slower: float, tmp_path: Path) -> None:
    """As many times longer as was predicted: the run's own plan takes that, the best plan more than before."""
    where, run = _cluster(tmp_path), _run("run.processes=8")
    predictor = predictor_of(run, where)
    plan = written_plan(run, predictor.cluster)
    step = MeasuredStep(run_file=run, step_s=slower * predictor.bill(plan).total)
    after, evidence = calibrated(predictor, predictor, step)
    assert after.bill(plan).total == pytest.approx(step.step_s, rel=1e-3)
    assert evidence == "calibrated"
    before = planned(run, where, keep=1)
    found = planned(run, where, keep=1, measured_step=step)
    assert found.found.best[0].step_s > before.found.best[0].step_s
    assert (before.evidence, found.evidence) == ("data sheet", "calibrated")
    assert "measured step" in found.basis


def test_a_step_of_the_same_machines_elsewhere_is_weaker_evidence(tmp_path: Path) -> None:
    """Two nodes planned, one measured."""
    run = _run("run.processes=8")
    here, there = predictor_of(run, _cluster(tmp_path, nodes=2)), predictor_of(run, _cluster(tmp_path))
    step_s = 1.2 * there.bill(written_plan(run, there.cluster)).total
    _, evidence = calibrated(here, there, MeasuredStep(run_file=run, step_s=step_s))
    assert evidence == "same machine type"


def test_what_no_machine_can_be_and_other_devices_are_refused(tmp_path: Path) -> None:
    """A step a thousand times shorter than predicted; a step of an A100 for a plan on H100s."""
    run = _run("run.processes=8")
    predictor = predictor_of(run, _cluster(tmp_path))
    with pytest.raises(UsageError, match="--of is the run that was measured"):
        calibrated(predictor, predictor, MeasuredStep(run_file=run, step_s=1e-6))
    other = predictor_of(run, _cluster(tmp_path, "dgx-a100-80gb"))
    with pytest.raises(UsageError, match="a100-sxm-80gb"):
        calibrated(predictor, other, MeasuredStep(run_file=run, step_s=1.0))


def test_a_step_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    """A mixture of experts says little of a dense model, and the other way round."""
    run, where = _run("run.processes=8"), _cluster(tmp_path)
    mixture = msgspec.structs.replace(run, model=MoEConfig(vocabulary=256, layers=4, width=128, heads=4))
    dense, mixed = predictor_of(run, where), predictor_of(mixture, where)
    with pytest.raises(UsageError, match="measured a mixture of experts, and the plan is for a dense model"):
        calibrated(dense, mixed, MeasuredStep(run_file=mixture, step_s=1.0))
    with pytest.raises(UsageError, match="measured a dense model, and the plan is for a mixture"):
        calibrated(mixed, dense, MeasuredStep(run_file=run, step_s=1.0))


@pytest.mark.parametrize("times_as_fast", [0.2, 1.1, 4.0])
def test_cores_may_be_several_times_as_fast_as_assumed(times_as_fast: float, tmp_path: Path) -> None:
    """No data sheet says what a core does: a step calibrates any that there are, and every plan with it."""
    run = _run("run.processes=2")
    predictor = predictor_of(run, _cluster(tmp_path, "cpu-2"))
    plan = written_plan(run, predictor.cluster)
    step = MeasuredStep(run_file=run, step_s=predictor.bill(plan).total / times_as_fast)
    after, evidence = calibrated(predictor, predictor, step)
    assert after.bill(plan).total == pytest.approx(step.step_s, rel=1e-2)
    assert evidence == "calibrated"
