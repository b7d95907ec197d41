"""Predictions of the layouts of `shoal bench layouts`, calibrated on one of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, UsageError
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.workload import calibrate_factor
from shoal.planning.answer import cluster_of, predictor_on, tensor_bytes
from shoal.planning.operators import measured_here, unpredicted
from shoal.planning.plan_file import written_plan
from shoal.recipes.benchmarks.layout_cases import CASES, Case, run_file_of
from shoal.recipes.benchmarks.layouts_beside import Beside
from shoal.runfile.load import load_run
from shoal.topology.calibration import Calibration

CALIBRATED_ON = CASES[0].name


def check_predicted(
    path: Path, calibration: Calibration | None, *, processes: int, overrides: Sequence[str] = ()
) -> None:
    """Predicts every layout of up to `processes` ranks once, so that no measurement is made in vain.

    Raises:
        ConfigError: the run file or one of its layouts cannot be, the sweep does not cover it, or this machine was not
            measured.
    """
    why = unpredicted(load_run(path, overrides), calibration)
    if why is not None:
        raise ConfigError(f"{path}: {why}")
    cases = [case for case in CASES if case.ranks <= processes]
    for case in cases:
        _check_case(path, case, overrides)
    for case in cases:
        _predict(path, case, calibration, overrides, 1.0)


def _check_case(path: Path, case: Case, overrides: Sequence[str]) -> None:
    """Whose layout it is, a rule of the run file does not say."""
    try:
        run_file_of(path, case, overrides)
    except UsageError as error:
        raise ConfigError(f'in the layout "{case.name}" of this benchmark: {error}') from None


def predicted(
    path: Path, found: dict[str, Any], calibration: Calibration | None, *, overrides: Sequence[str] = ()
) -> tuple[list[Beside], float]:
    """Every measured layout beside its prediction, and the machine's factor.

    Raises:
        ConfigError: this machine was not measured, or the sweep does not cover the run.
    """
    measured = {name: (one["seconds"], max(one["peak_bytes"])) for name, one in found.items()}
    cases = [case for case in CASES if case.name in measured]
    first = next((case for case in cases if case.name == CALIBRATED_ON), cases[0])
    factor = calibrate_factor(
        lambda value: _step_s(path, first, calibration, overrides, value), measured[first.name][0]
    )
    return [
        _beside(path, case, calibration, overrides, factor, measured[case.name], case is first) for case in cases
    ], factor


def constants(path: Path, calibration: Calibration | None, factor: float) -> list[dict[str, Any]]:
    """Every number that predictions use beside measured operators and collectives, with its origin."""
    predictor = _predictor(path, CASES[0], calibration, (), factor)
    assert predictor.measured is not None
    listed = [*predictor.measured.listed(), *predictor.constants.listed()]
    return [{"constant": name, "value": value, "origin": origin} for name, value, origin in listed]


def _beside(
    path: Path,
    case: Case,
    calibration: Calibration | None,
    overrides: Sequence[str],
    factor: float,
    measured: tuple[float, int],
    calibrated: bool,
) -> Beside:
    one = _predict(path, case, calibration, overrides, factor)
    return Beside(
        layout=case.name,
        ranks=case.ranks,
        measured_s=measured[0],
        predicted_s=one.step_s,
        measured_bytes=measured[1],
        predicted_bytes=max(tensor_bytes(footprint) for footprint in one.footprints),
        calibrated=calibrated,
    )


def _predict(
    path: Path, case: Case, calibration: Calibration | None, overrides: Sequence[str], factor: float
) -> Prediction:
    predictor = _predictor(path, case, calibration, overrides, factor)
    return predictor.predict(written_plan(run_file_of(path, case, overrides), predictor.cluster))


def _step_s(path: Path, case: Case, calibration: Calibration | None, overrides: Sequence[str], factor: float) -> float:
    predictor = _predictor(path, case, calibration, overrides, factor)
    return predictor.bill(written_plan(run_file_of(path, case, overrides), predictor.cluster)).total


def _predictor(
    path: Path, case: Case, calibration: Calibration | None, overrides: Sequence[str], factor: float
) -> Predictor:
    run_file = run_file_of(path, case, overrides)
    measured = measured_here(run_file, calibration)
    if measured is None:
        raise ConfigError(f"{path}: {unpredicted(run_file, calibration)}")
    return predictor_on(run_file, cluster_of(run_file, None), measured=measured.calibrated(factor))
