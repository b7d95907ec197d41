"""What a save costs: seconds that the step waits, and seconds until storage has everything.

Ranks that hold the same part of the state divide it among themselves, so that each of N ranks copies about an N-th of
it into host memory while the step waits. A thread writes the copy beside the following steps, and the next save cannot
begin before that is done:

    stall = state bytes / (N x staging rate)        write = state bytes / (nodes x storage rate)

The state is the weights and what the optimizer keeps, moments in 8 bits in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.plan import Plan
from shoal.planner.predict.predictor import Predictor
from shoal.topology.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class SaveSeconds:
    """Of one save."""

    stall_s: float
    write_s: float


def save_seconds(cluster: Cluster, *, state_bytes: float, ranks: int) -> SaveSeconds:
    """Of a state of `state_bytes` that `ranks` ranks on all nodes of `cluster` save together."""
    rates = cluster.reliability
    return SaveSeconds(
        stall_s=state_bytes / ranks / (rates.staging_gb_s * 1e9),
        write_s=state_bytes / (cluster.nodes * rates.storage_gb_s * 1e9),
    )


def save_of(predictor: Predictor, plan: Plan) -> SaveSeconds:
    """Of the state of a plan's model."""
    state = predictor.stack.state
    whole = predictor.parameters * (state.weight + (state.optimizer if state.saved is None else state.saved))
    return save_seconds(predictor.cluster, state_bytes=whole, ranks=plan.world_size)
