"""Closed forms of collectives against each other, against a step-by-step play, and against measured all-reduces."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.collectives import algorithms
from shoal.comm.algorithms.choose import walk_s
from shoal.cost import alpha_beta
from shoal.cost.alpha_beta import group_of
from shoal.topology.cluster_file import cluster_from, known_cluster
from shoal.topology.links import clustered

PUBLISHED = Path(__file__).parent.parent / "planner" / "published"
MEASURED_ERROR = 0.45
"""Worst of eleven sizes: the measured curve has steps at 8 to 16 MiB, where NCCL changes its protocol."""
LARGE_ERROR = 0.05
FORMS: tuple[Callable[..., float], ...] = (
    alpha_beta.ring_all_reduce,
    alpha_beta.ring_all_gather,
    alpha_beta.double_binary_tree,
    alpha_beta.pairwise_all_to_all,
)


@pytest.mark.parametrize("form", FORMS)
def test_one_rank_costs_nothing(form: Callable[..., float]) -> None:
    """There is nobody to talk to."""
    assert form(1, 1e9, latency_s=1e-5, bytes_s=1e9) == 0


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20)
@given(ranks=st.integers(2, 4096), size=st.floats(0, 1e12), latency=st.floats(0, 1e-3), rate=st.floats(1e6, 1e12))
def test_all_are_monotone(form: Callable[..., float], ranks: int, size: float, latency: float, rate: float) -> None:
    """More bytes, more latency or less bandwidth is never faster."""
    base = form(ranks, size, latency_s=latency, bytes_s=rate)
    assert form(ranks, 2 * size, latency_s=latency, bytes_s=rate) >= base
    assert form(ranks, size, latency_s=2 * latency, bytes_s=rate) >= base
    assert form(ranks, size, latency_s=latency, bytes_s=rate / 2) >= base


@settings(max_examples=30)
@given(ranks=st.integers(2, 64), size=st.integers(1, 1 << 30))
def test_a_ring_is_what_its_steps_add_up_to(ranks: int, size: int) -> None:
    """2(n-1) steps of an n-th of the vector each."""
    played = sum(1e-6 + size / ranks / 1e9 for _ in range(2 * (ranks - 1)))
    assert alpha_beta.ring_all_reduce(ranks, size, latency_s=1e-6, bytes_s=1e9) == pytest.approx(played)


@pytest.mark.parametrize("machine", ["dgx-a100-80gb", "dgx1-v100"])
def test_measured_all_reduces_of_a_node(machine: str) -> None:
    """nccl-tests on 8 ranks, 1 MiB to 1 GiB: every size roughly, the large ones well."""
    device = "a100" if "a100" in machine else "v100"
    group = group_of(known_cluster(machine, 1), 8, stride=1, world=8)
    with open(PUBLISHED / "vtrain_nccl_allreduce_intranode.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == device and row["ranks"] == "8"]
    assert len(rows) == 11
    for row in rows:
        size = int(row["size_MiB"]) * 2**20
        bound = LARGE_ERROR if size >= 2**28 else MEASURED_ERROR
        assert group.all_reduce(size) == pytest.approx(int(row["time_ns"]) * 1e-9, rel=bound), row


def test_two_nodes_of_four_ports_reach_the_published_bus_bandwidth() -> None:
    """91 GB/s for 16 A100 and four 200 Gb/s ports a node (github.com/NVIDIA/nccl-tests#100)."""
    group = group_of(known_cluster("a100-4nic", 2), 16, stride=1, world=16)
    size = 8 * 2**30
    assert 2 * 15 / 16 * size / group.all_reduce(size) / 1e9 == pytest.approx(91, rel=LARGE_ERROR)


def test_groups_share_the_ports_of_their_node() -> None:
    """Eight groups with one rank on each node get an eighth each; one group of all ranks gets all."""
    cluster = known_cluster("dgx-a100-80gb", 4)
    apart = group_of(cluster, 4, stride=8, world=32)
    together = group_of(cluster, 32, stride=1, world=32)
    assert apart.local == 1
    assert together.local == 8
    assert apart.bytes_s * 8 == pytest.approx(together.bytes_s)


def test_an_oversubscribed_spine_slows_a_group_that_crosses_it() -> None:
    """And leaves one under a leaf alone."""
    table = {
        "cluster": {"nodes": 16, "machine": "dgx-h100"},
        "network": {"kind": "leaf-spine", "nodes_per_leaf": 4, "oversubscription": 4},
    }
    spine, fat = cluster_from(table, file="c"), known_cluster("dgx-h100", 16)
    assert group_of(spine, 4, stride=8, world=128) == group_of(fat, 4, stride=8, world=128)
    assert group_of(spine, 16, stride=8, world=128).bytes_s < group_of(fat, 16, stride=8, world=128).bytes_s


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 16), (8, 64), (4, 4)])
def test_an_all_to_all_shares_the_port_of_its_node(nodes: int, ranks: int) -> None:
    """Long messages: the port of a node carries what all of its ranks send to other nodes, and nothing less."""
    cluster = known_cluster("dgx-h100", nodes)
    stride = 8 * nodes // ranks
    local, size = 8 // stride, 1e9
    leaving = 8 * size * (ranks - local) / ranks
    expected = leaving / cluster.machine.scale_out.bytes_s
    found = group_of(cluster, ranks, stride=stride, world=8 * nodes).all_to_all(size)
    assert found == pytest.approx(expected, rel=LARGE_ERROR)


def test_an_all_to_all_over_nodes_is_as_slow_as_the_walk_of_its_messages() -> None:
    """`comm.algorithms.choose` plays every message on links with one port a node; its pairs take turns, so that links
    idle.
    """
    cluster, size = known_cluster("dgx-a100-80gb", 4), 1e9
    up, out = cluster.machine.scale_up, cluster.machine.scale_out
    links = clustered([rank // 8 for rank in range(32)], inner=(0, up.bytes_s), outer=(0, out.bytes_s))
    walked = walk_s(algorithms.all_to_all_by_direct(32), size, links)
    found = group_of(cluster, 32, stride=1, world=32).all_to_all(size)
    assert 0.8 * walked < found < 1.05 * walked
