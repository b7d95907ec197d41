"""`shoal plan --measured-step SECONDS --of RUN.toml`: one measured step calibrates every prediction for its cluster.

The rates of a data sheet are those of the best shapes at full power; a device in a long run reaches 0.6 to 0.95 of
them. One number carries that: a factor on the rate of matrix products; where the host's launches set the pace, the
seconds of a launch; on a machine whose operators were measured, a factor on all of their seconds; on CPU cores whose
rates are assumed, one on their speed, of computing and of memory alike. It is the one with which the measured run's own
plan is predicted to take what it took.

A run that has trained on this machine has left its steps behind: `step_of_earlier_run` finds them, and a plan of the
same model needs no measurement of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shoal import units
from shoal.errors import UsageError
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts, text_of
from shoal.observe.prediction import measured_attempt, median_step_s
from shoal.observe.record import layer_loads, mean_imbalance
from shoal.planner.explain.residuals import Evidence
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.workload import (
    Constants,
    calibrate_compute,
    calibrate_dispatch,
    calibrate_factor,
    calibrate_speed,
)
from shoal.planning.plan_file import written_plan
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile, run_directory
from shoal.topology.cluster import Cluster
from shoal.topology.devices import DEVICES

ONE_HOST = ("on one host", "one rank alone")
"""How the reason for a run's backend says that all ranks were on one host (`shoal.comm.config`)."""

MET = 0.01
"""Share of the measured step by which the calibrated prediction may miss it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """`step_s` seconds of one step of `run_file`, on the cluster of a file; None: where it is planned for. `directory`
    is that of the run, where the step was found there. Of a mixture, the fullest expert got `expert_imbalance` times
    the mean. `tried`: on one rank, a moment ago (`planning.tried_step`)."""

    run_file: RunFile
    step_s: float
    cluster: Path | None = None
    directory: Path | None = None
    expert_imbalance: float = 1.0
    tried: bool = False


def step_of_earlier_run(run_file: RunFile, *, host: str) -> MeasuredStep | None:
    """The median step in the run directory of `run_file`; None where no run on CPU cores of `host` alone has left one
    that says something of this run.

    Model, precision and strategy must be the same; layout, batch and processes are what a plan varies.
    Raises `UsageError` or `ConfigError` for a run directory that cannot be read.
    """
    directory = run_directory(run_file)
    if run_file.run.device == "cuda" or not (directory / "run.toml").is_file():
        return None
    facts = read_facts(directory)
    alone = any(words in text_of(facts.get("wire")) for words in ONE_HOST)
    if text_of(facts.get("host")) != host or text_of(facts.get("device")) != "cpu" or not alone:
        return None
    ran = load_run(directory / "run.toml", ())
    events = measured_attempt(read_events(directory))
    step_s = median_step_s(events)
    if step_s is None or not _alike(ran, run_file):
        return None
    return MeasuredStep(
        run_file=ran, step_s=step_s, directory=directory, expert_imbalance=mean_imbalance(layer_loads(events))
    )


def _alike(a: RunFile, b: RunFile) -> bool:
    """Whether a step of one says something of the other's."""
    return (a.model, a.precision, a.sync, a.run.compile) == (b.model, b.precision, b.sync, b.run.compile)


def calibrated(predictor: Predictor, of: Predictor, step: MeasuredStep) -> tuple[Predictor, Evidence]:
    """`predictor` with the factor that makes `of` predict the measured step, and what kind of evidence that is.

    Raises:
        UsageError: the devices or the kinds of model differ, or no factor that a machine can have gives the measured
            seconds.
        LayoutError: the measured run does not fit its cluster's devices.
    """
    there, here = of.cluster, predictor.cluster
    if there.device != here.device:
        raise UsageError(
            f"--of was measured on {there.device.name}, and the plan is for {here.device.name}: a step calibrates "
            "devices of its own kind; give one of the same, or leave out --measured-step"
        )
    if _mixed(of) != _mixed(predictor):
        kinds = ("a dense model", "a mixture of experts")
        raise UsageError(
            f"--of measured {kinds[_mixed(of)]}, and the plan is for {kinds[_mixed(predictor)]}: a step calibrates "
            "models of its own kind; give a run of the same, or leave out --measured-step"
        )
    of = of.on(_part(there, step.run_file), measured=of.measured)
    plan = written_plan(step.run_file, of.cluster)
    evidence: Evidence = "calibrated" if there == here else "same machine type"
    if of.measured is not None and predictor.measured is not None:
        own = of.measured
        factor = calibrate_factor(lambda x: _on(of, own.calibrated(x)).bill(plan).total, step.step_s)
        _check(_on(of, own.calibrated(factor)).bill(plan).total, step.step_s, of.cluster)
        return _on(predictor, predictor.measured.calibrated(factor)), evidence

    def predicted_s(constants: Constants) -> float:
        return of.on(of.cluster, constants=constants).bill(plan).total

    if there.device == DEVICES["cpu-core"]:  # assumed rates, of no data sheet: a core may be several times as fast
        speed = calibrate_speed(lambda x: of.on(of.cluster.at_speed(x)).bill(plan).total, step.step_s)
        _check(of.on(of.cluster.at_speed(speed)).bill(plan).total, step.step_s, of.cluster)
        return predictor.on(here.at_speed(speed)), evidence
    constants = calibrate_compute(predicted_s, step.step_s, of.constants)
    if not _met(predicted_s(constants), step.step_s):
        constants = calibrate_dispatch(predicted_s, step.step_s, of.constants)
    _check(predicted_s(constants), step.step_s, of.cluster)
    found = replace(predictor.constants, compute=constants.compute, dispatch_s=constants.dispatch_s)
    return predictor.on(here, constants=found), evidence


def _mixed(predictor: Predictor) -> bool:
    return predictor.workload.model.experts > 0


def _on(predictor: Predictor, measured: Measured) -> Predictor:
    return predictor.on(predictor.cluster, measured=measured)


def _part(cluster: Cluster, run_file: RunFile) -> Cluster:
    """As many of its devices as the run asks for; all of them where it does not say."""
    asked = run_file.stated_processes
    try:
        return cluster if asked is None else cluster.with_devices(asked)
    except ValueError as error:
        raise UsageError(f"--of asks for {asked} processes: {error}") from None


def _met(predicted_s: float, measured_s: float) -> bool:
    return abs(predicted_s / measured_s - 1) <= MET


def _check(predicted_s: float, measured_s: float, cluster: Cluster) -> None:
    if not _met(predicted_s, measured_s):
        raise UsageError(
            f"--measured-step: {units.seconds(measured_s)} was measured, and no rate of {cluster.device.name} comes "
            f"nearer than {units.seconds(predicted_s)}: check that --of is the run that was measured, and the links of "
            f"{cluster.name}"
        )
