"""A checkpoint of one layout is a checkpoint of every other."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assembly.journey import Leg, travel
from tests.verification.layouts import GPT, MOE, corpus

SAME_MATH = 1e-12
"""Losses in float64 over 20 steps of AdamW, relative (contracts.md)."""
STEPS = 10
NO_AXES = ("expert", "sequence_parallel", "tensor_grid")

DENSE: dict[str, dict[str, Any]] = {
    "one process": {},
    "replicate": {"layout": {"replicate": 2}},
    "tensor": {"layout": {"tensor": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "pipeline": {"layout": {"pipeline": 2}},
    "ZeRO-3": {"layout": {"shard": 4}, "memory": {"zero": 3}},
    "context": {"layout": {"context": 2}},
    "ZeRO-2": {"layout": {"shard": 2}, "memory": {"zero": 2}},
    "tensor, pipeline": {"layout": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}},
    "V, ZeRO-1": {
        "layout": {"pipeline": 2, "shard": 2},
        "memory": {"zero": 1},
        "pipeline": {"schedule": "ZBVZeroBubble"},
    },
    "tensor, ZeRO-3": {"layout": {"tensor": 2, "shard": 2}},
    "grid": {"layout": {"tensor": 4, "tensor_grid": [2, 2]}},
    "replicate, context": {"layout": {"replicate": 2, "context": 2}},
    "one process again": {},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "one process": {},
    "expert in shard": {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}},
    "expert in tensor": {"layout": {"tensor": 2, "expert": 2}},
    "pipeline": {"layout": {"pipeline": 2}},
    "ZeRO-3": {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 3}},
}


def tables(model: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "precision": {"kind": "float64"}, **layout}


def world(layout: dict[str, Any]) -> int:
    return prod(size for axis, size in layout.get("layout", {}).items() if axis not in NO_AXES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("journeys")
    corpus(folder)
    return folder


@pytest.fixture(scope="module")
def straight(ranks, folder: Path) -> dict[str, Leg]:
    """Twenty steps of one process without a stop."""
    models = {"dense": GPT | {"tied": True, "kv_heads": 2}, "moe": MOE}
    return {
        name: ranks(1, travel, tables(model, {}), str(folder), f"straight-{name}", 2 * STEPS)[0]
        for name, model in models.items()
    }


PAIRS = [("dense", *pair) for pair in pairwise(DENSE)] + [("moe", *pair) for pair in pairwise(MIXTURES)]


@pytest.mark.slow
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize(("kind", "here", "there"), PAIRS, ids=lambda value: value.replace(" ", "-"))
def test_a_layout_goes_on_where_another_stopped(
    ranks, folder: Path, straight: dict[str, Leg], kind: str, here: str, there: str
) -> None:
    """Parameters and the optimizer's state are the same bits, and the losses go on as those of one process."""
    model = GPT | {"tied": True, "kv_heads": 2} if kind == "dense" else MOE
    layouts, run = DENSE if kind == "dense" else MIXTURES, f"{kind}-{here}-{there}".replace(" ", "-")
    legs = []
    for name in (here, there):
        layout = layouts[name]
        legs.append(ranks(world(layout), travel, tables(model, layout), str(folder), run, STEPS)[0])
    saved, loaded = legs[0].left, legs[1].came
    assert saved.keys() == loaded.keys()
    differing = [name for name in saved if not torch.equal(saved[name], loaded[name])]
    assert differing == []
    assert not any(tensor.isnan().any() for tensor in loaded.values() if tensor.is_floating_point())
    assert legs[0].losses + legs[1].losses == pytest.approx(straight[kind].losses, rel=SAME_MATH)


MIXED = {"precision": {"kind": "bfloat16_params"}, "model": GPT | {"tied": True}}
OF_MASTERS = ["one process", "ZeRO-1", "tensor", "ZeRO-3", "pipeline", "ZeRO-2", "replicate", "one process again"]


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), list(pairwise(OF_MASTERS)), ids=lambda value: value.replace(" ", "-"))
def test_masters_go_where_another_layout_stopped(ranks, folder: Path, here: str, there: str) -> None:
    """Masters and moments are the same bits under any layout, in float32, and none of a checkpoint is bfloat16."""
    run, legs = f"masters-{here}-{there}".replace(" ", "-"), []
    for name in (here, there):
        layout = DENSE[name]
        legs.append(ranks(world(layout), travel, MIXED | layout, str(folder), run, 3)[0])
    saved, loaded = legs[0].left, legs[1].came
    assert saved.keys() == loaded.keys()
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one process", "ZeRO-1", "ZeRO-3"])
def test_a_run_with_masters_resumes_to_the_bit(ranks, folder: Path, name: str) -> None:
    """Six steps, and three with three more behind a checkpoint: losses, masters, moments."""
    layout, run = (
        DENSE[name] | {"layout": {axis: min(size, 2) for axis, size in DENSE[name].get("layout", {}).items()}},
        name,
    )
    straight = ranks(world(layout), travel, MIXED | layout, str(folder), f"straight-masters-{run}", 6)[0]
    legs = [ranks(world(layout), travel, MIXED | layout, str(folder), f"resumed-masters-{run}", 3)[0] for _ in range(2)]
    assert legs[0].losses + legs[1].losses == straight.losses
    assert [name for name in straight.left if not torch.equal(straight.left[name], legs[1].left[name])] == []


def test_a_float32_run_goes_on_with_masters_and_back(ranks, folder: Path) -> None:
    """A checkpoint does not show in which precision a run computed: the same names, types and bits."""
    kinds, legs = ("float32", "bfloat16_params", "bfloat16"), []
    for kind in kinds:
        tables = MIXED | {"precision": {"kind": kind}}
        legs.append(ranks(1, travel, tables, str(folder), "changes-precision", 2)[0])
    for before, after in pairwise(legs):
        assert before.left.keys() == after.came.keys()
        assert all(torch.equal(before.left[name], after.came[name]) for name in before.left)
