"""What a run is expected to take, said before its first step, and kept beside what it took.

Only on a machine that was measured, and for what the sweep covers: otherwise nothing is predicted, and the run says how
a prediction is had.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal import units
from shoal.errors import LayoutError, ShoalError, UsageError
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts
from shoal.observe.prediction import BASIS, MEMORY, STEP, Compared, Forecast, compared, measured_attempt, median_step_s
from shoal.planner.explain.records import prediction_record
from shoal.planner.explain.text import table
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import search
from shoal.planning.answer import cluster_of, predictor_of, predictor_on, tensor_bytes
from shoal.planning.calibration import UNCOVERED, calibration_here, measured_here, unpredicted
from shoal.planning.history import Past, remember
from shoal.planning.measured_step import MeasuredStep, calibrated
from shoal.planning.memory_budget import used_by
from shoal.planning.plan_file import runnable, written_plan
from shoal.runfile.run_file import RunFile
from shoal.topology.calibration import Calibration
from shoal.topology.cluster_file import cluster_from

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


# What a run that was measured here would take on other machines: `shoal plan RUN.toml --elsewhere RUN_DIR`.
#
# Its median step calibrates this machine's predictions (`shoal.planning.measured_step`): one factor on all seconds.
# More cores of the same kind then take their share of the work, at the collectives that were measured here. GPUs stand
# on data sheets alone. No step of a model as small as those that are tried on a laptop was published on GPUs, so that
# nothing is known of how far such a prediction is off: it has no interval.


CORES = (4, 16)
"""Ranks, each on a core of its own like those of this machine."""
GPUS = (("1 A100 80 GB", "dgx-a100-80gb", 1), ("8 H100", "dgx-h100", 8))
"""(name, machine, devices)"""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """The fastest plan on a machine, and what its seconds stand on."""

    where: str
    prediction: Prediction
    basis: str


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run on this machine: `step_s` its median step (s), `here` that beside what was predicted before it began."""

    run_file: RunFile
    step_s: float
    here: Compared | None


def measured_run(run_file: RunFile, directory: Path) -> MeasuredRun:
    """The run of `run_file` as its directory recorded it. Raises `UsageError` where it took no steps yet."""
    facts, events = read_facts(directory), read_events(directory)
    step_s = median_step_s(measured_attempt(events))
    if step_s is None:
        raise UsageError(f"--elsewhere {directory}: no measured steps are there; name the directory of a run")
    return MeasuredRun(
        run_file=run_file, step_s=step_s, here=next((one for one in compared(facts, events) if one.name == STEP), None)
    )


def elsewhere(run: MeasuredRun) -> list[Elsewhere]:
    """The run on more cores like these, and on GPUs. Machines on which nothing fits are left out.

    Raises `UsageError` where no factor gives the measured step.
    """
    return [*_on_cores(run), *_on_gpus(run)]


def _on_cores(run: MeasuredRun) -> Iterator[Elsewhere]:
    here = predictor_of(run.run_file, None)
    found, _ = calibrated(here, here, MeasuredStep(run_file=run.run_file, step_s=run.step_s))
    for ranks in CORES:
        measured = (
            None if found.measured is None else replace(found.measured, cores=ranks).calibrated(found.measured.factor)
        )
        cluster = found.cluster.with_devices(ranks)
        basis = f"the step measured here, on {ranks} such cores"
        yield from _best(run.run_file, found.on(cluster, measured=measured), f"{ranks} cores like these", basis)


def _on_gpus(run: MeasuredRun) -> Iterator[Elsewhere]:
    for name, machine, devices in GPUS:
        head = {"name": name, "nodes": 1, "machine": machine, "devices_per_node": devices}
        predictor = predictor_on(run.run_file, cluster_from({"cluster": head}, file=name))
        yield from _best(run.run_file, predictor, name, "data sheets, nothing measured")


def _best(run_file: RunFile, predictor: Predictor, where: str, basis: str) -> Iterator[Elsewhere]:
    try:
        found = search(predictor, Allowed(), keep=1, legal=runnable(run_file, predictor.cluster))
    except LayoutError:
        return
    yield Elsewhere(where=where, prediction=found.best[0], basis=basis)


def as_record(run: MeasuredRun, found: list[Elsewhere]) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "measured_s": run.step_s,
        "predicted_s": None if run.here is None else run.here.predicted,
        "elsewhere": [{"where": one.where, "basis": one.basis, **prediction_record(one.prediction)} for one in found],
    }


def as_text(run: MeasuredRun, found: list[Elsewhere]) -> str:
    """A sentence on this machine, and a line a machine."""
    steps = run.run_file.run.steps
    took = f"Here a step took {units.seconds(run.step_s)}"
    if run.here is not None:
        took += f"; {units.seconds(run.here.predicted)} were predicted before it began ({100 * run.here.error:+.0f} %)"
    rows = [
        (
            one.where,
            one.prediction.plan.describe(),
            units.seconds(one.prediction.step_s),
            units.duration(steps * one.prediction.step_s),
            one.basis,
        )
        for one in found
    ]
    head = ("elsewhere, predicted", "fastest layout", "step", f"{steps:,} steps", "from")
    return f"{took}.\n\n{table(head, rows)}"
