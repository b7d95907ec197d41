"""The scaling curve and the front of devices; and where nothing fits, the smallest cluster that would do."""

from __future__ import annotations

import re

import pytest

from shoal.errors import LayoutError
from shoal.planner.search.candidates import Allowed, candidates
from shoal.planner.search.scaling import WORTH, pareto, scaling_of, sizes
from shoal.planner.search.search import fewest_nodes, fitting_memory, search, smallest_cluster
from shoal.topology.cluster_file import known_cluster
from tests.planner.jobs import LARGE, predictor

NODE = known_cluster("dgx-h100", 1)
FEW = Allowed(schedules=("1F1B",), recompute=("none", "full"))


def test_the_curve_has_the_fastest_plan_of_each_size() -> None:
    """Sizes are whole; the middle one is the plan that was found for the cluster itself."""
    maker = predictor(cluster=NODE, samples=16)
    best = search(maker, FEW, keep=1).best[0]
    curve = scaling_of(maker, best, steps=1000, allowed=FEW).curve
    assert [one.devices for one in curve] == [2, 4, 8, 16, 32]
    assert curve[2].prediction.step_s == pytest.approx(best.step_s)
    assert all(one.device_hours == pytest.approx(one.cost.wall_s / 3600 * one.devices) for one in curve)
    assert (sizes(1), sizes(6)) == ([1, 2, 4], [3, 6, 12, 24])


def test_nothing_on_the_front_is_worth_less_than_another() -> None:
    """Each is better than every other in time, memory or device-hours; everything else has one that is as good."""
    maker = predictor(cluster=NODE, samples=16)
    best = search(maker, FEW, keep=1).best[0]
    front = scaling_of(maker, best, steps=1000, allowed=FEW).front
    assert list(front) == pareto(front)
    for one in front:
        for other in front:
            beaten = all(a <= b * (1 + WORTH) for a, b in zip(one.costs, other.costs, strict=True))
            assert one is other or not beaten or one.costs > other.costs


def test_the_smallest_cluster_is_the_smallest() -> None:
    """It fits, no smaller number of nodes does, and the sentence names it."""
    maker = predictor(LARGE, NODE, samples=48, sequence=4096)
    allowed = Allowed(schedules=("1F1B",))
    found = smallest_cluster(maker, allowed)
    assert found is not None
    assert found >= fewest_nodes(maker) > 1
    for nodes in range(1, found + 1):
        there = maker.on(NODE.with_nodes(nodes))
        plans = candidates(there.workload, there.cluster, allowed)
        assert any(fitting_memory(there, plan) is not None for plan in plans) == (nodes == found)
    with pytest.raises(LayoutError) as caught:
        search(maker, allowed)
    assert re.search(rf": {found} nodes of it would do", str(caught.value))
