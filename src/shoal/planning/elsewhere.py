"""What a run that was measured here would take on other machines: `shoal plan RUN.toml --elsewhere RUN_DIR`.

Its median step calibrates this machine's predictions (`shoal.planning.measured_step`): one factor on all seconds.
More cores of the same kind then take their share of the work, at the collectives that were measured here. GPUs stand
on data sheets alone. No step of a model as small as those that are tried on a laptop was published on GPUs, so that
nothing is known of how far such a prediction is off: it has no interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal import units
from shoal.errors import LayoutError, UsageError
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts
from shoal.observe.prediction import STEP, Compared, compared, measured_attempt, median_step_s
from shoal.planner.explain.text import table
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import search
from shoal.planning.answer import predictor_of, predictor_on
from shoal.planning.measured_step import MeasuredStep, calibrated
from shoal.planning.plan_file import runnable
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster_file import cluster_from

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
        "elsewhere": [{"where": one.where, "basis": one.basis, **one.prediction.record()} for one in found],
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
