"""`shoal plan --measured-step SECONDS --of RUN.toml`: one measured step calibrates every prediction for its cluster.

The rates of a data sheet are those of the best shapes at full power; a device in a long run reaches 0.6 to 0.95 of
them. One number carries that: a factor on the rate of matrix products; where the host's launches set the pace, the
seconds of a launch; on a machine whose operators were measured, a factor on all of their seconds. It is the one with
which the measured run's own plan is predicted to take what it took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shoal import units
from shoal.errors import UsageError
from shoal.planner.explain.residuals import Evidence
from shoal.planner.predict.bill import Constants
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.workload import calibrate_compute, calibrate_dispatch, calibrate_factor
from shoal.planning.plan_file import written_plan
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster import Cluster

MET = 0.01
"""Share of the measured step by which the calibrated prediction may miss it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """`step_s` seconds of one step of `run_file`, on the cluster of a file; None: where it is planned for."""

    run_file: RunFile
    step_s: float
    cluster: Path | None = None


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
    asked = run_file.run.processes or run_file.layout.default_processes
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
