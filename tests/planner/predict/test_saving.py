"""What a save costs follows from bytes and rates."""

from __future__ import annotations

import msgspec
import pytest

from shoal.planner.predict.run_cost import run_cost, save_of, save_seconds
from shoal.planner.search.candidates import Allowed
from shoal.planner.search.search import search
from shoal.topology.cluster_file import known_cluster
from tests.planner.jobs import predictor


def test_a_save_waits_for_its_copy_and_writes_what_every_node_gives() -> None:
    """4.8 TB of 384 ranks at 10 GB/s each hold up 1.25 s; from 48 nodes at 1 GB/s they take 100 s."""
    cluster = known_cluster("dgx-h100", 48)
    one = save_seconds(cluster, state_bytes=4.8e12, ranks=384)
    assert (one.stall_s, one.write_s) == pytest.approx((1.25, 100.0))
    faster = msgspec.structs.replace(cluster.reliability, staging_gb_s=20, storage_gb_s=4)
    other = save_seconds(msgspec.structs.replace(cluster, reliability=faster), state_bytes=4.8e12, ranks=384)
    assert (other.stall_s, other.write_s) == pytest.approx((0.625, 25.0))


def test_a_runs_cost_counts_what_its_saves_take() -> None:
    """Storage that is slower by a hundred keeps the saves apart; staging that is slower lowers the effective share."""
    fast = predictor(samples=64)
    best = search(fast, Allowed(tensor=1), keep=1).best[0]
    rates = msgspec.structs.replace(fast.cluster.reliability, storage_gb_s=0.01)
    slow = fast.on(msgspec.structs.replace(fast.cluster, reliability=rates))
    assert run_cost(slow, best, steps=10**6).save_every_s >= save_of(slow, best.plan).write_s > 0
    rates = msgspec.structs.replace(fast.cluster.reliability, staging_gb_s=0.01)
    held = fast.on(msgspec.structs.replace(fast.cluster, reliability=rates))
    shares = [run_cost(one, best, steps=10**6).effective_share for one in (held, fast)]
    assert shares[0] < shares[1] < 1
