"""Packed weights are divided over tensor, and a checkpoint of them is a checkpoint of every layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.parallel.tensor.layers import Cut, part_of
from shoal.parallel.tensor.plan import TensorPart
from shoal.state import owned_run
from shoal.topology.holding import Box, Holding
from shoal.topology.layout import placed
from tests.assembly.journey import travel
from tests.verification.layouts import corpus
from tests.verification.test_split_by_tracing import GPT2, HERE

SAME_MATH = 1e-12
"""Losses in float64 over few steps of AdamW, relative (contracts.md)."""

PACKED = {
    "kind": "python",
    "build": f"{HERE}:build",
    "arguments": {"name": "PackedCausal"},
    "roles": {"*.qkv.weight": "packed", "*.out.weight": "row", "*.both.weight": "packed", "*.down.weight": "row"},
    "counts": [f"blocks.{i}.attention.{name}" for i in range(2) for name in ("width", "heads")],
}

LEGS: list[dict[str, Any]] = [
    {},
    {"layout": {"tensor": 2}},
    {"layout": {"tensor": 2, "shard": 2}, "memory": {"zero": 1}},
    {"layout": {"tensor": 2, "shard": 2}},
    {},
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("linear", PACKED), ("conv1d", GPT2)])
def test_packed_weights_go_on_under_another_layout(ranks, tmp_path: Path, name: str, model: dict[str, Any]) -> None:
    """Under names and shapes of the unsplit model, bit by bit, with optimizer state; losses as in one process."""
    if name == "conv1d":
        pytest.importorskip("transformers")
    corpus(tmp_path)
    base = {"model": model, "precision": {"kind": "float64"}}
    straight = ranks(1, travel, base, str(tmp_path), "straight", 2 * len(LEGS))[0]
    legs = [
        ranks(2 * len(leg.get("layout", {})) or 1, travel, base | leg, str(tmp_path), "journey", 2)[0] for leg in LEGS
    ]
    for before, after in pairwise(legs):
        assert {n: t.shape for n, t in before.left.items()} == {n: t.shape for n, t in straight.left.items()}
        assert [n for n in before.left if not torch.equal(before.left[n], after.came[n])] == []
    assert [loss for leg in legs for loss in leg.losses] == pytest.approx(straight.losses, rel=SAME_MATH)


@pytest.mark.parametrize(("dim", "shape"), [(0, (12, 5)), (1, (5, 12)), (0, (12,))])
def test_a_rank_has_its_part_of_every_block_and_no_more(dim: int, shape: tuple[int, ...]) -> None:
    """The boxes of its part, one after the other, are its numbers; any run of them is found again in the whole."""
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    part = TensorPart(dim, 2, 2, (1,), False, None, 4)
    own, boxes = part_of(whole, {dim: Cut(2, 2, (1,), 4)}), part.boxes(shape)
    assert 2 * own.numel() == whole.numel()
    assert torch.equal(own.flatten(), torch.cat([whole[box.slices].flatten() for box in boxes]))
    holding = Holding("w", shape, boxes, placed("dense"), 0, (0,), (0,), (0,), (0,))
    for start, stop in [(0, own.numel()), (1, own.numel() - 1), (3, 5)]:
        run = owned_run(holding, torch.nn.Parameter(own.flatten()[start:stop]), start, stop)
        found = [whole[region.box.slices].flatten() for region in run.regions]
        assert torch.equal(torch.cat(found), run.parameter)
        assert run.regions[0].start == 0
        assert all(isinstance(region.box, Box) for region in run.regions)
