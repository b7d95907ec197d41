"""Clusters fail as often as published ones of their architecture, unless they say otherwise."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from shoal.topology.cluster import Architecture, Reliability
from shoal.topology.cluster_file import known_cluster
from shoal.topology.failures import PUBLISHED, failures_per_s, published_rate

HOUR_S = 3600.0
SPREAD = 2.6  # RSC-1 and RSC-2, of one owner and one year, differ by 2.8 among themselves


def test_llama_3s_cluster_is_interrupted_as_often_as_published() -> None:
    """466 times in 54 days: every 2.8 hours."""
    cluster = known_cluster("dgx-h100", 2048)
    assert 1 / failures_per_s(cluster) / HOUR_S == pytest.approx(54 * 24 / 466)


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.source.split(",")[0])
def test_every_published_cluster_is_near_its_architectures_rate(one: object) -> None:
    """Within the factor that the module states."""
    own, rate = one.per_1000_node_days, published_rate(one.architecture)  # type: ignore[attr-defined]
    assert rate / SPREAD < own < rate * SPREAD


def test_every_architecture_has_a_rate_and_the_reference_names_it() -> None:
    """What the key's sentence says is what the table gives."""
    said = Reliability.__annotations__["failures_per_1000_node_days"]
    for architecture in get_args(Architecture):
        assert f"{published_rate(architecture):.1f} {architecture}" in said.replace('" "', "")


def test_failures_add_up_over_devices() -> None:
    """Twice the nodes fail twice as often, and a node of 72 devices nine times as often as one of eight."""
    ten, twenty = known_cluster("dgx-b200", 10), known_cluster("dgx-b200", 20)
    assert failures_per_s(twenty) == pytest.approx(2 * failures_per_s(ten))
    assert failures_per_s(known_cluster("gb200-nvl72", 10)) == pytest.approx(9 * failures_per_s(ten))


def test_a_cluster_that_states_its_rate_has_that() -> None:
    """Per node, whatever the node holds."""
    cluster = known_cluster("gb200-nvl72", 10)
    own = msgspec.structs.replace(cluster, reliability=Reliability(failures_per_1000_node_days=100))
    assert failures_per_s(own) == pytest.approx(1 / 86400)
    never = msgspec.structs.replace(cluster, reliability=Reliability(failures_per_1000_node_days=0))
    assert failures_per_s(never) == 0
