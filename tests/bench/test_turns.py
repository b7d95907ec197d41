"""Sides take their steps in turn, and each mesh of a benchmark meets in a place of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.bench import groups
from shoal.bench.groups import WARM_UP_STEPS, interleaved, join_mesh
from shoal.launcher.environment import Place
from shoal.topology.layout import Layout


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The k-th step of "a" takes 10 k seconds, that of "b" k seconds."""
    counters = {"a": iter(range(0, 1000, 10)), "b": iter(range(100))}
    monkeypatch.setattr(groups, "slowest", lambda step, clock: float(step()))
    return {name: lambda name=name: next(counters[name]) for name in counters}


def test_every_turn_has_all_that_are_compared(sides: dict[str, Any]) -> None:
    """Warm-up turns are not returned; a side that is not compared is in every third turn."""
    found = interleaved(sides, None, pairs=6, always=["b"])  # type: ignore[arg-type]
    assert [turn["b"] for turn in found] == [float(WARM_UP_STEPS + k) for k in range(6)]
    assert ["a" in turn for turn in found] == [True, False, False] * 2


def test_a_warm_step_follows_one_of_the_same_side(sides: dict[str, Any]) -> None:
    """The mean of the last two of three steps in a row."""
    found = interleaved(sides, None, pairs=2, always=["a", "b"], warm=True)  # type: ignore[arg-type]
    firsts = [3 * (WARM_UP_STEPS + k) for k in range(2)]
    assert found == [{"a": 10 * (first + 1.5), "b": first + 1.5} for first in firsts]


def sums_of_meshes(place: Any) -> list[float]:
    """Of ones, over each of three meshes that all ranks join one after the other through one store."""
    own = Place(place.rank, place.size, place.rank, place.size, node_rank=0, launcher="shoal")
    meshes = [join_mesh(layout, own, place.store) for layout in (Layout(shard=2), Layout(replicate=2), Layout(shard=2))]
    ones = [torch.ones(1) for _ in meshes]
    for mesh, one in zip(meshes, ones, strict=True):
        mesh.world.all_reduce(one).wait()
    return [float(one) for one in ones]


def test_a_store_takes_several_meshes(ranks: Any) -> None:
    """A rank that is late finds the others where this mesh is, not where the one before it was."""
    assert ranks(2, sums_of_meshes) == [[2.0, 2.0, 2.0]] * 2
