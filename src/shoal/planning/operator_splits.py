"""`shoal plan --operators N`: a split of every operator of the run's model over N tensor ranks, beside its roles'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal import units
from shoal.cost.plan import Plan
from shoal.errors import LayoutError
from shoal.models.roles import roles_of
from shoal.planner.explain.text import table
from shoal.planner.intra.choose import OperatorPrices, ParameterSplits, Problem, placements_of
from shoal.planner.intra.graph import Node, graph_of
from shoal.planner.intra.strategies import WHOLE
from shoal.planner.predict.predictor import Predictor
from shoal.planner.trace.operator import TracedGroup
from shoal.planner.trace.subject import Subject
from shoal.planning.tracing import subject_of
from shoal.runfile.run_file import RunFile


@dataclass(frozen=True, kw_only=True)
class OperatorSplits:
    """Of one microbatch of `microbatch` samples on `ranks` ranks. `by_roles`: parameters as roles lay them, `whole`:
    none of them split; everything else is then as cheap as can be."""

    ranks: int
    microbatch: int
    kinds: Mapping[str, str]
    cheapest: ParameterSplits
    by_roles: ParameterSplits
    whole: ParameterSplits

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
    problem = Problem(graph, OperatorPrices(predictor.machine.rates, links, predictor.stack.update_bytes))
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
