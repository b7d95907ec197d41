"""Predictions of the layouts of `benchmarks.layouts`, calibrated on one of its rows, beside what was measured."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layout_cases import CASES, Case, run_file_of
from shoal.bench.report import Check, check
from shoal.errors import ConfigError, UsageError
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.workload import calibrate_factor
from shoal.planning.answer import cluster_of, predictor_on, tensor_bytes
from shoal.planning.calibration import measured_here, unpredicted
from shoal.planning.plan_file import written_plan
from shoal.runfile.load import load_run
from shoal.topology.calibration import Calibration

CALIBRATED_ON = CASES[0].name
FAR_APART = 0.10
"""Only layouts whose measured steps differ by more than this have an order."""
MEDIAN_ERROR, ORDER, NEAR, NEAR_SHARE, TOO_LOW = 0.10, 0.90, 0.05, 0.90, 0.10


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One layout. `calibrated`: the machine's factor comes from its measured step, so its time counts in no figure."""

    layout: str
    ranks: int
    measured_s: float
    predicted_s: float
    measured_bytes: float
    predicted_bytes: float
    calibrated: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured bytes, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def rows_of(found: Iterable[Compared]) -> list[dict[str, Any]]:
    """Worst first; the calibrated one last."""
    ordered = sorted(found, key=lambda one: (one.calibrated, -abs(one.error)))
    return [
        {
            "layout": one.layout,
            "ranks": one.ranks,
            "measured_ms": round(1e3 * one.measured_s, 2),
            "predicted_ms": round(1e3 * one.predicted_s, 2),
            "error": round(one.error, 4),
            "measured_mb": round(one.measured_bytes / 1e6, 2),
            "predicted_mb": round(one.predicted_bytes / 1e6, 2),
            "memory_error": round(one.memory_error, 4),
            "calibrated": one.calibrated,
        }
        for one in ordered
    ]


def checks_of(found: Sequence[Compared]) -> list[Check]:
    """The promised figures."""
    timed = [one for one in found if not one.calibrated]
    memory = [one.memory_error for one in found]
    near = sum(abs(error) <= NEAR for error in memory) / len(memory)
    return [
        check(
            "step time: median error", statistics.median(abs(one.error) for one in timed), MEDIAN_ERROR, at_most=True
        ),
        check("step time: order right, share of pairs over 10 % apart", order_share(timed), ORDER),
        check("memory: share of layouts within 5 %", near, NEAR_SHARE),
        check("memory: most too low", max(0.0, -min(memory)), TOO_LOW, at_most=True),
    ]


def order_share(found: Sequence[Compared]) -> float:
    """The share of pairs, measured over a tenth apart, whose order is predicted; 1 where there are none."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(found, 2)
        if max(a.measured_s, b.measured_s) > (1 + FAR_APART) * min(a.measured_s, b.measured_s)
    ]
    right = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
    return right / len(pairs) if pairs else 1.0


def check_predictable(
    path: Path, calibration: Calibration | None, *, processes: int, overrides: Sequence[str] = ()
) -> None:
    """Predicts every layout of up to `processes` ranks once, so that nothing is measured that cannot be compared.

    Raises:
        ConfigError: The run file or one of its layouts is impossible, no prediction covers it, or this machine is not
            calibrated.
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
    """Raises `ConfigError` that says whose layout it is, which a rule of the run file cannot know."""
    try:
        run_file_of(path, case, overrides)
    except UsageError as error:
        raise ConfigError(f'in the layout "{case.name}" of this benchmark: {error}') from None


def compared(
    path: Path, found: dict[str, Any], calibration: Calibration | None, *, overrides: Sequence[str] = ()
) -> tuple[list[Compared], float]:
    """Every measured layout with its prediction, and the machine's factor.

    Raises:
        ConfigError: This machine is not calibrated, or no prediction covers the run.
    """
    measured = {name: (one["seconds"], max(one["peak_bytes"])) for name, one in found.items()}
    cases = [case for case in CASES if case.name in measured]
    first = next((case for case in cases if case.name == CALIBRATED_ON), cases[0])
    factor = calibrate_factor(
        lambda value: _step_s(path, first, calibration, overrides, value), measured[first.name][0]
    )
    return [
        _compared(path, case, calibration, overrides, factor, measured[case.name], case is first) for case in cases
    ], factor


def constants(path: Path, calibration: Calibration | None, factor: float) -> list[dict[str, Any]]:
    """A row for every number that predictions use besides measured operators and collectives, with its origin."""
    predictor = _predictor(path, CASES[0], calibration, (), factor)
    assert predictor.measured is not None
    listed = [*predictor.measured.listed(), *predictor.constants.listed()]
    return [{"constant": name, "value": value, "origin": origin} for name, value, origin in listed]


def _compared(
    path: Path,
    case: Case,
    calibration: Calibration | None,
    overrides: Sequence[str],
    factor: float,
    measured: tuple[float, int],
    calibrated: bool,
) -> Compared:
    one = _predict(path, case, calibration, overrides, factor)
    return Compared(
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
