"""What is known of the machine that this process stands on, as predictions use it.

`shoal plan --operators N`: a split of every operator of the run's model over N tensor ranks, beside its roles'.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal import units
from shoal.comm.config import Capabilities, WireConfig, choose_backend
from shoal.cost.plan import Plan
from shoal.engine.config import Float32
from shoal.errors import LayoutError
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.roles import roles_of
from shoal.planner.explain.text import table
from shoal.planner.intra.choose import Choice, Prices, Problem, placements_of
from shoal.planner.intra.graph import WHOLE, Node, graph_of
from shoal.planner.predict.measured import Measured, measured_of
from shoal.planner.predict.predictor import Predictor
from shoal.planner.trace.operator import TracedGroup
from shoal.planner.trace.subject import Subject
from shoal.planning.cluster_here import calibration_path, read_calibration
from shoal.planning.tracing import subject_of
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster import Calibration

UNCOVERED = "no prediction: covered are dense GPTs in float32 on CPU ranks of one thread, on one host"
HOW = "no prediction: this machine is not calibrated; 'shoal bench products' measures it in about a minute"
SWEPT = ("shm", "gloo")
"""Backends whose collectives `shoal bench products` measures beside the operators."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def calibration_here(environ: Mapping[str, str]) -> Calibration | None:
    """What was measured on this machine; None before anything was. Raises `ConfigError` for a damaged file."""
    return read_calibration(calibration_path(environ))


def measured_here(run_file: RunFile, calibration: Calibration | None) -> Measured | None:
    """What predicts this run's steps on this machine's cores.

    None where nothing was measured, for transports that were not, and for what the sweep of operators does not cover:
    mixtures, other precisions than float32, compiled models. `unpredicted` says which.

    Raises:
        ConfigError: the calibration has holes.
    """
    if calibration is None or unpredicted(run_file, calibration) is not None:
        return None
    return _measured(run_file.wire, calibration)


def measured_for_traces(run_file: RunFile, calibration: Calibration | None) -> Measured | None:
    """What prices the traced operators of a model that is none of this project's, by those of the sweep.

    None where nothing was measured, for transports that were not, for other precisions than float32 and for compiled
    models. Raises `ConfigError` where the calibration has holes.
    """
    if calibration is None or not isinstance(run_file.precision, Float32) or run_file.run.compile:
        return None
    measured = _is_measured(calibration, _backend(run_file.wire))
    return _measured(run_file.wire, calibration) if measured and calibration.operators else None


def _measured(wire: WireConfig, calibration: Calibration) -> Measured:
    found = measured_of(calibration, cores=cores(), dtype="float32", backend=_backend(wire))
    return found.calibrated(calibration.step_factor or 1.0)


def unpredicted(run_file: RunFile, calibration: Calibration | None) -> str | None:
    """Why this run's steps are not predicted on this machine, and what would help; None where they are."""
    if not covered(run_file):
        return UNCOVERED
    backend = _backend(run_file.wire)
    unmeasured = calibration is None or not _is_measured(calibration, backend)
    verb = "'shoal bench comm'" if backend in SWEPT else f"'shoal bench comm --backends {backend}'"
    if calibration is None or not calibration.operators:
        return HOW if not unmeasured or backend in SWEPT else f"{HOW}, and {verb} its collectives over {backend}"
    if unmeasured:
        return f"no prediction: collectives over {backend} were not measured on this machine; {verb} measures them"
    return None


def _is_measured(calibration: Calibration, backend: str) -> bool:
    """Whether the ranks of one host were measured over `backend`, in float32."""
    return any((fit.backend, fit.hosts, fit.dtype) == (backend, 1, "float32") for fit in calibration.collectives)


def _backend(wire: WireConfig) -> str:
    """Over which the run's ranks talk on one host."""
    return choose_backend(wire.transport, Capabilities("cpu", hosts=("here", "here"))).backend


def covered(run_file: RunFile) -> bool:
    """Whether the sweep has the operators of this run: a dense GPT in float32, uncompiled."""
    model = run_file.model
    dense = isinstance(model, GPTConfig) and not isinstance(model, MoEConfig) and not model.dropout
    return dense and isinstance(run_file.precision, Float32) and not run_file.run.compile


@dataclass(frozen=True, kw_only=True)
class OperatorSplits:
    """Of one microbatch of `microbatch` samples on `ranks` ranks. `by_roles`: parameters as roles lay them, `whole`:
    none of them split; everything else is then as cheap as can be."""

    ranks: int
    microbatch: int
    kinds: Mapping[str, str]
    cheapest: Choice
    by_roles: Choice
    whole: Choice

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "ranks": self.ranks,
            "microbatch": self.microbatch,
            "cheapest_s": self.cheapest.cost_s,
            "by_roles_s": self.by_roles.cost_s,
            "whole_s": self.whole.cost_s,
            "parameters": [
                {
                    "name": name,
                    "role": kind,
                    "by_role": str(self.by_roles.placements[name]),
                    "cheapest": str(self.cheapest.placements[name]),
                }
                for name, kind in self.kinds.items()
            ],
        }

    def text(self) -> str:
        """What the three choices cost, and a line for all parameters that differ by numbers in their names alone."""
        lines = [(one["name"], one["role"], one["by_role"], one["cheapest"]) for one in self.record()["parameters"]]
        rows = dict.fromkeys((re.sub(r"\d+", "*", name), *rest) for name, *rest in lines)
        return (
            f"Splits of operators over {self.ranks} tensor ranks, a microbatch of {self.microbatch} with its update: "
            f"{units.seconds(self.cheapest.cost_s)} as cheap as can be, {units.seconds(self.by_roles.cost_s)} with "
            f"parameters by their roles, {units.seconds(self.whole.cost_s)} with whole ones\n"
            + table(("parameter", "role", "by role", "cheapest"), rows)
        )


def operator_splits(run_file: RunFile, predictor: Predictor, plan: Plan, *, ranks: int) -> OperatorSplits:
    """For the microbatches of `plan`, on neighbouring devices. Raises `LayoutError`, `UserCodeError`."""
    devices = predictor.cluster.devices
    if ranks < 2 or devices % ranks:
        raise LayoutError(f"--operators {ranks}: the tensor ranks must be at least 2 and divide {devices} devices")
    subject, _ = subject_of(run_file)
    graph = _graph(subject, plan.microbatch)
    kinds = {name: role.kind for name, role in roles_of(subject.model).items()}
    links = predictor.machine.group(ranks, stride=1, world=plan.world_size)
    problem = Problem(graph, Prices(predictor.machine.rates, links, predictor.stack.update_bytes))
    fixed = placements_of(kinds, graph, ranks)
    return OperatorSplits(
        ranks=ranks,
        microbatch=plan.microbatch,
        kinds={name: kinds[name] for name in fixed},
        cheapest=problem.solved(),
        by_roles=problem.solved(fixed),
        whole=problem.solved(dict.fromkeys(fixed, WHOLE)),
    )


def _graph(subject: Subject, samples: int) -> tuple[Node, ...]:
    """The forward of the unsplit model."""
    with subject.mode:
        step = subject.steps(subject.model, samples, vocabulary=None, group=TracedGroup(1))
    return graph_of(subject.model, step.loss, mode=subject.mode)
