"""`verify` catches mistakes: some are planted in every kind of state, and what each spoils is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.foreign_models import PICTURES, foreign
from tests.recipes.layouts import GPT, MOE, corpus
from tests.recipes.planted import verified_with

TIED = GPT | {"tied": True}
OWN = {"kind": "python", "build": "tests.recipes.user_models:biased"}
PIPEDREAM = {"layout": {"pipeline": 2}, "pipeline": {"schedule": "PipeDream"}}
REPLICATE = {"layout": {"replicate": 2}}
NORMS = {"model": foreign("conv_norm", {"batch_norm": "grouped", "group_samples": 2}), "data": PICTURES}
MICRO = {"batch": {"micro_samples": 2}}
NO_LOSSES = MOE | {"balance": "none", "router_z_loss": 0.0}

PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "all_reduce_left_out": ({"layout": {"tensor": 2}}, "gradient", "norm.weight"),
    "mean_for_sum": ({"layout": {"replicate": 2}}, "gradient", ""),
    "bias_per_tensor_rank": ({"layout": {"tensor": 2}, "model": OWN}, "gradient", "feed_forward.2.bias"),
    "norm_per_stage": ({"layout": {"pipeline": 2}, "model": TIED}, "norm", "norm"),
    "wrong_group": ({"layout": {"context": 2}}, "gradient", "blocks.0.attention.query.weight"),
    "microbatch_dropped": ({"layout": {"pipeline": 2}}, "gradient", ""),
    "wrong_rotary_offset": ({"layout": {"context": 2}}, "gradient", "attention"),
    "auxiliary_unscaled": ({"layout": {"replicate": 2}, "model": MOE}, "gradient", "router.weight"),
    "stale_shard": ({"layout": {"shard": 2}, "memory": {"zero": 1}}, "weight", "blocks.0.attention.key.weight"),
    "routed_otherwise": ({"layout": {"replicate": 2}, "model": MOE}, "route", "blocks."),
    "stash_forgotten": ({**PIPEDREAM, "optimizer": {"lr": 0.1}}, "gradient", "embedding.weight"),
    "panel_unsummed": ({"layout": {"tensor": 2, "tensor_grid": [2, 1]}}, "gradient", "blocks."),
    "statistics_unsummed": ({**REPLICATE, **NORMS}, "buffer", "running_"),
    "rate_of_one_rank": ({**REPLICATE, "schedule": {"warmup_steps": 5}}, "rate", "of step"),
    "wrong_under_autocast": ({**REPLICATE, "precision": {"kind": "bfloat16"}}, "gradient", ""),
    "masks_of_other_samples": ({**REPLICATE, "model": foreign("nested", dropout=0.1)}, "gradient", ""),
    "shares_of_rank_0": (REPLICATE, "gradient", ""),
    "clipped_by_half_the_norm": (
        {**REPLICATE, "optimizer": {"kind": "sgd", "lr": 0.1, "clip_norm": 0.1}},
        "weight",
        "",
    ),
    "decay_left_out": ({**REPLICATE, "optimizer": {"kind": "adamw", "lr": 0.1, "weight_decay": 0.5}}, "weight", ""),
    "buffers_not_rewound": ({**REPLICATE, **MICRO, "model": foreign("spectral")}, "gradient", ""),
    "router_gradient_dropped": ({"layout": {"shard": 2}, "model": NO_LOSSES}, "gradient", "router.weight"),
}
"""The tables of the run, the quantity that must be found off, and what its name must hold."""


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_mistake_is_caught_by_name(ranks, tmp_path: Path, fault: str) -> None:
    """The verdict does not hold, and the worst of the first step is what the fault spoils."""
    tables, quantity, name = PLANTED[fault]
    corpus(tmp_path)
    verdict, _ = ranks(2, verified_with, fault, tables, str(tmp_path))
    assert not verdict["holds"]
    assert verdict["first"]["quantity"] == quantity, verdict["sentence"]
    assert name in verdict["first"]["name"], verdict["sentence"]
