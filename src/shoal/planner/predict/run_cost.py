"""What a run costs on a cluster: time with failures and saves, money, energy.

A run of n steps of T seconds takes n T / (effective share) seconds; the share is that of the availability-optimal
interval between checkpoints (cost.interval), with the cluster's failure rate, its time to recover, and what a save of
the model holds the job up.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.interval import availability_optimal_s, effective_share
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.saving import save_of
from shoal.topology.failures import failures_per_s


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """A whole run. `money` and `energy_kwh` are None where the cluster states no price and no power."""

    training_s: float
    wall_s: float
    effective_share: float
    save_every_s: float
    money: float | None
    energy_kwh: float | None


def run_cost(predictor: Predictor, one: Prediction, *, steps: int) -> RunCost:
    """The cost of `steps` steps of a predicted plan on all of the predictor's cluster."""
    cluster, training_s = predictor.cluster, one.step_s * steps
    save = save_of(predictor, one.plan)
    rate, recovery = failures_per_s(cluster), cluster.reliability.recovery_s
    between = 1 / rate if rate > 0 else float("inf")
    best = max(save.stall_s + save.write_s, availability_optimal_s(save.stall_s, between, recovery_s=recovery))
    every = min(best, max(training_s, 2 * save.stall_s))
    share = 1 - save.stall_s / every
    if rate > 0:
        share = effective_share(every, save.stall_s, between, recovery_s=recovery)
    wall_s = training_s / share
    hours = wall_s / 3600 * cluster.devices
    price, watts = cluster.price.device_hour, cluster.price.device_watts
    return RunCost(
        training_s=training_s,
        wall_s=wall_s,
        effective_share=share,
        save_every_s=every,
        money=None if price is None else price * hours,
        energy_kwh=None if watts is None else watts * hours / 1e3,
    )
