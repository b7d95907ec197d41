"""What a save costs: seconds that the step waits, and seconds until storage has everything.

A rank copies its share of the weights and the optimizer's state into host memory while the step waits, and a thread
writes it out beside the following steps. The next save cannot begin before that is done:

    stall = bytes of the fullest rank / staging rate        write = bytes of the whole state / (nodes x storage rate)

Replicas hold the same state, which is written once.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.footprint import Footprint
from shoal.topology.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class SaveSeconds:
    """Of one save."""

    stall_s: float
    write_s: float


def save_seconds(cluster: Cluster, fullest: Footprint, *, state_bytes: float) -> SaveSeconds:
    """`fullest` is the rank that holds most, `state_bytes` the weights and the optimizer's state of the whole model."""
    own_bytes = fullest.weights + fullest.optimizer
    saving = cluster.reliability
    return SaveSeconds(
        stall_s=own_bytes / (saving.staging_gb_s * 1e9),
        write_s=state_bytes / (cluster.nodes * saving.storage_gb_s * 1e9),
    )
