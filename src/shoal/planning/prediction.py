"""What a run is expected to take, said before its first step, and kept beside what it took.

Only on a machine that was measured, and for what the sweep covers: otherwise nothing is predicted, and the run says how
a prediction is had.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts
from shoal.observe.prediction import BASIS, MEMORY, STEP, Forecast, compared
from shoal.planner.predict.predictor import Prediction
from shoal.planning.answer import cluster_of, predictor_on, tensor_bytes
from shoal.planning.calibration import UNCOVERED, calibration_here, measured_here, unpredicted
from shoal.planning.history import Past, remember
from shoal.planning.memory_budget import used_by
from shoal.planning.plan_file import written_plan
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import Calibration

MEASURED = "predicted from this machine's measured operators and collectives"


def prediction_facts(
    run_file: RunFile, *, device: str, one_host: bool, threads: int, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Facts of the run: seconds of a step and bytes of the fullest rank, or why there are none.

    Bytes are those that the process has already, without the model's, and what the tensors of a step come to. What is
    wrong with a calibration stops no run.
    """
    if device != "cpu" or not one_host or threads != 1:
        return {BASIS: UNCOVERED}
    try:
        calibration = calibration_here(environ)
        why = unpredicted(run_file, calibration)
        one = _predicted(run_file, calibration) if why is None else None
    except ShoalError as error:
        return {BASIS: f"no prediction: {error}"}
    if one is None:
        return {BASIS: why}
    bytes_ = max(tensor_bytes(footprint) - footprint.weights for footprint in one.footprints)
    return {BASIS: MEASURED, STEP: one.step_s, MEMORY: round(_resident_bytes() + bytes_)}


def _predicted(run_file: RunFile, calibration: Calibration | None) -> Prediction | None:
    """The run file's own plan on this machine's cores; None where nothing was measured. Raises `ConfigError`."""
    measured = measured_here(run_file, calibration)
    if measured is None:
        return None
    predictor = predictor_on(run_file, cluster_of(run_file, None), measured=measured)
    return predictor.predict(written_plan(run_file, predictor.cluster))


def remember_run(directory: Path, environ: Mapping[str, str]) -> None:
    """When a run is over: its prediction and its measurement go into this machine's history."""
    facts = read_facts(directory)
    found = {one.name: one for one in compared(facts, read_events(directory))}
    if STEP in found:
        step, memory = found[STEP], found.get(MEMORY)
        past = Past(
            time_s=time.time(),
            run=str(facts.get("name", "")),
            layout=_axes(facts.get("layout")),
            predicted_s=step.predicted,
            measured_s=step.measured,
            predicted_bytes=memory.predicted if memory else None,
            measured_bytes=memory.measured if memory else None,
        )
        remember(past, environ)


def _axes(layout: Any) -> str:
    """The axes that are split."""
    found = layout if isinstance(layout, dict) else {}
    return " ".join(f"{axis}={size}" for axis, size in found.items() if size != 1) or "one rank"


def _resident_bytes() -> int:
    """Of this process, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def start_facts(
    run_file: RunFile, *, device: str, one_host: bool, threads: int, environ: Mapping[str, str]
) -> dict[str, Any]:
    """`prediction_facts`, and what a budget of memory has chosen."""
    predicted = prediction_facts(run_file, device=device, one_host=one_host, threads=threads, environ=environ)
    return predicted | {"memory_budget": used_by(run_file)}


FORECAST = Forecast(start_facts, remember_run)
"""What a run states before it starts, and keeps when it has ended."""
