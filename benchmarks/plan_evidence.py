"""Published steps under each kind of evidence: measured over predicted, by table.

The calibrated row of a table is left out where it gave the constant. Where the evidence is the same machine type, each
table is predicted with the constants of every other table that was measured on the same device with models of its own
kind: mixtures of experts, or dense ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.plan import predicted_s, scored
from benchmarks.plan_errors import Machine
from shoal.planner.explain.residuals import Evidence
from shoal.planner.predict.workload import Constants

HOST_BOUND = "vTrain's node"
"""Calibrated on the host's seconds of an operator, which say nothing of products."""

Ratios = dict[str, list[float]]


def ratios_by_evidence(machines: Sequence[Machine]) -> dict[Evidence, Ratios]:
    """Measured over predicted seconds of every row, by the name of its machine type."""
    return {
        "calibrated": {
            one.name: [row.row.measured_s / row.predicted_s for row in scored(one) if not row.calibrated]
            for one in machines
        },
        "same machine type": {one.name: found for one in machines if (found := _by_others(one, machines))},
        "data sheet": {one.name: _ratios(one, Constants()) for one in machines},
    }


def _by_others(machine: Machine, machines: Sequence[Machine]) -> list[float]:
    others = [one for one in machines if one is not machine and one.name != HOST_BOUND]
    alike = [one for one in others if _device(one) == _device(machine) and _mixed(one) == _mixed(machine)]
    return [ratio for one in alike for ratio in _ratios(machine, Constants(compute=one.constants.compute))]


def _ratios(machine: Machine, constants: Constants) -> list[float]:
    return [row.measured_s / predicted_s(row, constants) for row in machine.rows]


def _device(machine: Machine) -> str:
    return machine.rows[0].cluster.device.name


def _mixed(machine: Machine) -> bool:
    return machine.rows[0].workload.model.experts > 0
