"""Cuts are balanced as well as any, and leave each rank its own parameters under their own names."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import LayoutError, UserCodeError
from shoal.models.roles import Part
from shoal.parallel.pipeline.stages import balanced_cut, cut_at, estimated_costs, measured_costs, stage_costs, staged
from tests.parallel.pipeline import chains

ROUNDING = 1e-9  # a few sums of floats
NAMES = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 5))
def test_no_cut_has_a_smaller_largest_stage_or_is_more_even(costs: list[float], stages: int) -> None:
    """Against all cuts there are."""
    if len(costs) < stages:
        with pytest.raises(LayoutError, match=f"at most {len(costs)} stages"):
            balanced_cut(costs, stages)
        return
    every = [[0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1)]
    loads = [[sum(costs[a:b]) for a, b in pairwise(ends)] for ends in every]
    least = min(max(load) for load in loads)
    found = stage_costs(costs, cut := balanced_cut(costs, stages))
    assert [part for stage in cut for part in stage] == list(range(len(costs)))
    assert all(len(stage) for stage in cut)
    assert max(found) <= least * (1 + ROUNDING)
    even = min(sum(c * c for c in load) for load in loads if max(load) <= least * (1 + ROUNDING))
    assert sum(c * c for c in found) <= even * (1 + ROUNDING) + ROUNDING


def test_cut_by_hand_starts_stages_at_the_named_parts() -> None:
    assert cut_at(NAMES, ["blocks.1", "head"], stages=3) == (range(2), range(2, 4), range(4, 5))


@pytest.mark.parametrize(
    ("firsts", "sentence"),
    [
        (["blocks.1"], "names 1 parts, but 3 stages"),
        (["blocks.1", "blocks.7"], "'blocks.7', which is no part"),
        (["head", "blocks.1"], "not in the order"),
        (["embedding", "head"], "leaves a stage"),
    ],
)
def test_cuts_by_hand_that_cannot_be_are_refused(firsts: list[str], sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        cut_at(NAMES, firsts, stages=3)


def test_estimate_counts_matrices_and_no_lookup() -> None:
    """Blocks cost the same; the head its vocabulary; the embedding next to nothing, also where it is tied."""
    for tied in (False, True):
        model = chains.gpt(tied=tied)
        embedding, *blocks, head = estimated_costs(model, model.parts())
        assert len(set(blocks)) == 1
        assert head == chains.VOCABULARY * chains.WIDTH
        assert embedding < 0.01 * blocks[0]


def test_measured_costs_are_the_clocks() -> None:
    """A clock that each part's forward moves on by its width: that is the cost."""
    model, now = chains.Perceptron(), 0.0

    def clock() -> float:
        return now

    def tick(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        nonlocal now
        now += output.shape[-1]

    for layer in model.layers:
        layer.register_forward_hook(tick)
    costs = measured_costs(model, torch.zeros(2, 3, chains.WIDTH), clock=clock)
    assert costs == [12, 8, 10, 8, 6, 9, 8, chains.VOCABULARY]


def test_a_rank_keeps_its_parameters_by_name_and_drops_the_others() -> None:
    """Four stages on two ranks: together they hold all, a tied weight on both, each by its name in the model."""
    names, kept = list(dict(chains.model("tied gpt").named_parameters(remove_duplicate=False))), []
    for rank in range(2):
        model = chains.model("tied gpt")
        stages = staged(model, balanced_cut(estimated_costs(model, model.parts()), 4), (0, 1, 0, 1))
        stages.keep(rank)
        kept.append(dict(model.named_parameters(remove_duplicate=False)))
        assert [name for name in names if len(stages.holders(name)) > 1] == ["embedding.weight", "head.weight"]
    assert sorted([*kept[0], *kept[1]]) == sorted(names)
    assert "embedding.weight" in kept[0]
    assert "head.weight" in kept[1]


def test_parameters_of_no_part_or_of_two_are_refused() -> None:
    model = chains.Perceptron()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(UserCodeError, match=r"'extra.weight' belongs to no part"):
        staged(model, (range(8),), (0,))
    doubled = chains.Perceptron()
    parts = doubled.parts()
    doubled.parts = lambda: [*parts, Part("twice", ("again",), parts[0].run)]  # pyright: ignore
    with pytest.raises(UserCodeError, match=r"the parts layers\.1, twice"):
        staged(doubled, (range(9),), (0,))
    with pytest.raises(UserCodeError, match=r"layout.pipeline=1"):
        staged(nn.Linear(2, 2), (range(1),), (0,))
