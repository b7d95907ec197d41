"""What a run costs on a cluster: time with failures and saves, money, energy.

A run of n steps of T seconds takes n T / (effective share) seconds; the share is that of the availability-optimal
interval between checkpoints (cost.interval), with the cluster's failure rate, its time to recover, and what a save of
the model holds the job up.

Ranks that hold the same part of the state divide it among themselves, so that each of N ranks copies about an N-th of
it into host memory while the step waits. A thread writes the copy beside the following steps, and the next save
cannot begin before that is done:

    stall = state bytes / (N x staging rate)        write = state bytes / (nodes x storage rate)

The state is the weights and what the optimizer keeps, moments in 8 bits in float32. Where checkpoints are written in
fewer bytes, these go to storage, and a thread of each rank codes all of the state first; the slower of both counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.interval import availability_optimal_s, effective_share
from shoal.cost.plan import Plan
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.topology.cluster import Cluster
from shoal.topology.failures import failures_per_s


@dataclass(frozen=True, kw_only=True)
class SaveSeconds:
    """Of one save, and the bytes that go to storage."""

    stall_s: float
    write_s: float
    written_bytes: float


CODING_GB_S = 0.45
"""Of a state that one thread codes in fewer bytes (`python -m benchmarks.checkpoint_bytes`)."""


def save_seconds(
    cluster: Cluster, *, state_bytes: float, ranks: int, written_bytes: float | None = None
) -> SaveSeconds:
    """Of a state of `state_bytes` that `ranks` ranks on all nodes of `cluster` save together; None: as it is."""
    rates, written = cluster.reliability, state_bytes if written_bytes is None else written_bytes
    coding_s = 0.0 if written_bytes is None else state_bytes / (ranks * CODING_GB_S * 1e9)
    return SaveSeconds(
        stall_s=state_bytes / ranks / (rates.staging_gb_s * 1e9),
        write_s=max(coding_s, written / (cluster.nodes * rates.storage_gb_s * 1e9)),
        written_bytes=written,
    )


def save_of(predictor: Predictor, plan: Plan) -> SaveSeconds:
    """Of the state of a plan's model."""
    state, number = predictor.stack.state, predictor.parameters
    written = None if state.written is None else number * state.written
    return save_seconds(
        predictor.cluster, state_bytes=number * state.in_checkpoint, ranks=plan.world_size, written_bytes=written
    )


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """A whole run. `money` and `energy_kwh` are None where the cluster states no price and no power."""

    training_s: float
    wall_s: float
    effective_share: float
    save_every_s: float
    checkpoint_bytes: float
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
        checkpoint_bytes=save.written_bytes,
        money=None if price is None else price * hours,
        energy_kwh=None if watts is None else watts * hours / 1e3,
    )
