"""What a save costs follows from bytes and rates."""

from __future__ import annotations

import msgspec
import pytest

from shoal.cost.footprint import Footprint
from shoal.planner.predict.saving import save_seconds
from shoal.topology.cluster_file import known_cluster

HELD = Footprint(
    weights=20e9,
    gradients=5e9,
    optimizer=40e9,
    activations=9e9,
    recomputed=0,
    logits=0,
    gathered=0,
    buckets=0,
    workspace=0,
    slack=0,
)


def test_a_save_waits_for_its_copy_and_writes_what_every_node_gives() -> None:
    """60 GB of weights and optimizer at 10 GB/s hold up 6 s; 4.8 TB from 48 nodes at 1 GB/s take 100 s."""
    cluster = known_cluster("dgx-h100", 48)
    one = save_seconds(cluster, HELD, state_bytes=4.8e12)
    assert (one.stall_s, one.write_s) == pytest.approx((6.0, 100.0))
    faster = msgspec.structs.replace(cluster.reliability, staging_gb_s=20, storage_gb_s=4)
    other = save_seconds(msgspec.structs.replace(cluster, reliability=faster), HELD, state_bytes=4.8e12)
    assert (other.stall_s, other.write_s) == pytest.approx((3.0, 25.0))
