"""What a run costs on a cluster: time with failures and saves, money, energy.

A run of n steps of T seconds takes n T / (effective share) seconds; the share is that of the availability-optimal
interval between checkpoints (cost.interval), with the cluster's failure rate and time to recover.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.interval import availability_optimal_s, effective_share
from shoal.topology.cluster import Cluster

SAVE_STALL_S = 2.0
"""Seconds that a save holds a step up where it writes in the background; blocking saves take longer."""


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """A whole run. `money` and `energy_kwh` are None where the cluster states no price and no power."""

    training_s: float
    wall_s: float
    effective_share: float
    save_every_s: float
    money: float | None
    energy_kwh: float | None


def run_cost(cluster: Cluster, *, step_s: float, steps: int, save_s: float = SAVE_STALL_S) -> RunCost:
    """The cost of `steps` steps of `step_s` seconds on all of the cluster."""
    training_s = step_s * steps
    rate = cluster.failures_per_s(cluster.nodes)
    recovery = cluster.reliability.recovery_s
    between = 1 / rate if rate > 0 else float("inf")
    every = min(availability_optimal_s(save_s, between, recovery_s=recovery), max(training_s, 2 * save_s))
    share = effective_share(every, save_s, between, recovery_s=recovery) if rate > 0 else 1 - save_s / every
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
