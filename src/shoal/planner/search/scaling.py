"""The same job on fewer and on more devices: the scaling curve, and what nothing beats in time, memory and money.

On one cluster money is time. It becomes a choice of its own where the number of devices is one: more of them end
earlier and cost more, since no job scales perfectly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import LayoutError
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.run_cost import RunCost, run_cost
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import search

WORTH = 0.01
"""A choice that is worse in one cost and no better than this in another only hides those that matter."""

AROUND = (-2, -1, 0, 1, 2)
"""Powers of two by which the devices are multiplied."""


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """A plan on a number of devices, and what the whole run costs with it."""

    devices: int
    prediction: Prediction
    cost: RunCost

    @property
    def device_hours(self) -> float:
        """What money is proportional to; it stands for it where the cluster states no price."""
        return self.cost.wall_s / 3600 * self.devices

    @property
    def costs(self) -> tuple[float, float, float]:
        """Seconds of the run, bytes of the fullest rank, device-hours: less is better."""
        return self.cost.wall_s, self.prediction.memory_bytes, self.device_hours

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "devices": self.devices,
            "plan": self.prediction.plan.describe(),
            "step_s": self.prediction.step_s,
            "wall_s": self.cost.wall_s,
            "memory_bytes": self.prediction.memory_bytes,
            "device_hours": self.device_hours,
            "money": self.cost.money,
        }


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """`curve`: the fastest plan of each number of devices, fewest first. `front`: what nothing beats, fastest first."""

    curve: tuple[SizedPlan, ...]
    front: tuple[SizedPlan, ...]


def scaling_of(predictor: Predictor, best: Prediction, *, steps: int, allowed: Allowed | None = None) -> Scaled:
    """A quarter to four times the devices for `steps` steps; sizes on which nothing fits are left out.

    Plans share `best`'s tensor and context axes, so that the search stays one of moments on large clusters.
    """
    found = _choices(predictor, best, steps, allowed or Allowed())
    return Scaled(
        curve=tuple(choices[0] for choices in found), front=tuple(pareto(one for choices in found for one in choices))
    )


def pareto(choices: Iterable[SizedPlan]) -> list[SizedPlan]:
    """Fastest first, each better than every faster one by at least `WORTH` in one of the three costs."""
    kept: list[SizedPlan] = []
    for one in sorted(choices, key=lambda choice: choice.costs):
        if not any(_beats(other, one) for other in kept):
            kept.append(one)
    return kept


def _beats(one: SizedPlan, other: SizedPlan) -> bool:
    return all(a <= b * (1 + WORTH) for a, b in zip(one.costs, other.costs, strict=True))


def _choices(predictor: Predictor, best: Prediction, steps: int, allowed: Allowed) -> list[Sequence[SizedPlan]]:
    """Per number of devices, the fastest plan first, then those that need less memory."""
    layout, found = best.plan.layout, []
    narrowed = replace(allowed, tensor=layout.tensor, context=layout.context)
    for devices in sizes(predictor.cluster.devices):
        try:
            there = _on(predictor, devices)
            plans = search(there, narrowed, keep=1).front
        except (LayoutError, ValueError):  # nothing fits there, or nodes would be broken up
            continue
        found.append([_choice(there, one, steps) for one in plans])
    return found


def _on(predictor: Predictor, devices: int) -> Predictor:
    """On a part or a multiple of the cluster; what was measured of one machine says nothing of several."""
    cluster = predictor.cluster.with_devices(devices)
    return predictor.on(cluster, measured=predictor.measured if cluster.nodes == 1 else None)


def sizes(devices: int) -> list[int]:
    """Whole numbers of devices around this one."""
    scaled = (devices * 2**power for power in AROUND)
    return sorted({int(size) for size in scaled if size >= 1 and size == int(size)})


def _choice(predictor: Predictor, one: Prediction, steps: int) -> SizedPlan:
    return SizedPlan(devices=predictor.cluster.devices, prediction=one, cost=run_cost(predictor, one, steps=steps))
