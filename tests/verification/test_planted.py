"""`verify` catches mistakes: some are planted in every kind of state, and what each spoils is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.topology.layout import Layout
from shoal.verification.verify import narrowing
from tests.models.huggingface import architectures
from tests.verification.foreign_models import PICTURES, TIMES, foreign
from tests.verification.layouts import GPT, MOE, corpus, run_file_of
from tests.verification.planted import plant_of, verified_with

TIED = GPT | {"tied": True}
OWN = {"kind": "python", "build": "tests.verification.user_models:biased"}
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
    "masters_rounded": ({**REPLICATE, "precision": {"kind": "bfloat16_params"}}, "weight", ""),
    "decay_left_out": ({**REPLICATE, "optimizer": {"kind": "adamw", "lr": 0.1, "weight_decay": 0.5}}, "weight", ""),
    "buffers_not_rewound": ({**REPLICATE, **MICRO, "model": foreign("spectral")}, "buffer", "layer.parametrizations"),
    "router_gradient_dropped": ({"layout": {"shard": 2}, "model": NO_LOSSES}, "gradient", "router.weight"),
}
"""The tables of the run, the quantity that must be found off, and what its name must hold."""

SGD = {"kind": "sgd", "lr": 0.1}
ADAM = {"kind": "adamw", "lr": 0.1}
EIGHT = {"kind": "adamw_8bit"}
WIDE = {"width": 64, "feed_forward_width": 96}
SEQUENCE = {"layout": {"tensor": 2, "sequence_parallel": True}}
FROZEN = {"model": foreign("conv_norm", frozen=True), "data": PICTURES}
WARM = {"schedule": {"warmup_steps": 5}}
LLAMA, GPT2 = architectures.LLAMA, architectures.GPT2

ON_ONE_RANK: dict[str, tuple[dict[str, Any], str, str]] = {
    "accumulation_overwritten": ({**REPLICATE, **MICRO}, "gradient", ""),
    "silent_rank": ({**REPLICATE, "model": LLAMA}, "gradient", ""),
    "rounded_to_half": ({**REPLICATE, "model": GPT2}, "gradient", ""),
    "signs_alone": ({"layout": {"shard": 2}, "memory": {"zero": 2}, "precision": {"kind": "bfloat16"}}, "gradient", ""),
    "own_denominator": ({"layout": {"shard": 2}, "model": foreign("nested")}, "gradient", ""),
    "norm_unsummed_in_sequence": (SEQUENCE, "gradient", "blocks.0.attention_norm.weight"),
    "tied_head_forgotten": ({"layout": {"pipeline": 2}, "model": TIED}, "gradient", "embedding.weight"),
    "inputs_rounded": (
        {**REPLICATE, "model": foreign("doubled"), "data": TIMES, "loss": {"kind": "squared_error"}}, "gradient", "",
    ),
    "loss_scale_left_in": ({**REPLICATE, "precision": {"kind": "float16"}, "optimizer": SGD}, "weight", ""),
    "statistics_not_committed": ({**REPLICATE, **NORMS}, "buffer", "running_"),
    "teacher_frozen": ({**REPLICATE, "model": foreign("distilled")}, "gradient", ""),
    "power_iteration_twice": ({**REPLICATE, "model": foreign("spectral")}, "refused", "layer"),
    "warmup_left_out": ({**REPLICATE, **WARM}, "rate", "of step"),
    "decays_twice_as_long": ({**REPLICATE, "model": foreign("nested")}, "rate", "of step"),
    "moments_forgotten": ({"layout": {"shard": 2}, "memory": {"zero": 1}, "optimizer": ADAM}, "weight", ""),
    "scales_of_other_blocks": ({"layout": {"shard": 2}, "optimizer": EIGHT, "model": GPT | WIDE}, "moment", "exp_avg"),
    "bias_correction_left_out": ({**REPLICATE, "optimizer": ADAM, "model": LLAMA}, "weight", ""),
    "updated_twice": ({**REPLICATE, "optimizer": SGD}, "weight", ""),
    "dropout_left_out": ({**REPLICATE, "model": GPT | {"dropout": 0.1}}, "gradient", ""),
    "masks_of_the_step_before": ({**REPLICATE, "model": foreign("noisy")}, "gradient", ""),
    "masks_of_the_first_part": ({"layout": {"tensor": 2}, "model": foreign("dropping")}, "gradient", "blocks."),
    "gates_unnormalised": ({**REPLICATE, "model": MOE}, "gradient", ""),
    "balance_moves_twice": ({**REPLICATE, "model": MOE | {"balance": "bias", "bias_rate": 0.1}}, "buffer", "bias"),
    "expert_forgotten": ({"layout": {"shard": 2}, "model": NO_LOSSES}, "gradient", "blocks."),
    "clip_left_out": ({**REPLICATE, "optimizer": SGD | {"clip_norm": 0.1}}, "weight", ""),
    "clip_of_one_rank": ({"layout": {"shard": 2}, "optimizer": SGD | {"clip_norm": 0.1}}, "weight", ""),
    "order_of_another_seed": ({**REPLICATE, "model": foreign("recurrent")}, "gradient", ""),
    "sample_repeated": ({**REPLICATE, "model": foreign("nested")}, "gradient", ""),
    "order_of_the_epoch_before": ({**REPLICATE, **FROZEN, "batch": {"global_samples": 48}}, "gradient", ""),
    "targets_shifted": (REPLICATE, "gradient", ""),
    "weight_of_padding": ({**REPLICATE, "model": LLAMA}, "gradient", ""),
}  # fmt: skip
"""The same; "refused": the run ends, and names what."""

QUICK = ("accumulation_overwritten", "statistics_not_committed", "warmup_left_out", "balance_moves_twice",
         "updated_twice", "scales_of_other_blocks", "sample_repeated", "teacher_frozen",
         "dropout_left_out")  # fmt: skip


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_mistake_is_caught_by_name(ranks, tmp_path: Path, fault: str) -> None:
    """The verdict does not hold, and the worst of the first step is what the fault spoils."""
    _require_caught(ranks, tmp_path, fault, *PLANTED[fault])


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in QUICK else pytest.mark.stress) for name in ON_ONE_RANK]
)
def test_a_mistake_of_one_rank_is_caught_by_name(ranks, tmp_path: Path, fault: str) -> None:
    """Whichever kind of state it spoils: gradients, statistics, schedule, precision, masks, routes, clip, order."""
    if ON_ONE_RANK[fault][0].get("model", {}).get("kind") == "transformers":
        pytest.importorskip("transformers")
    _require_caught(ranks, tmp_path, fault, *ON_ONE_RANK[fault])


def _require_caught(ranks, folder: Path, fault: str, tables: dict[str, Any], quantity: str, name: str) -> None:
    corpus(folder)
    (worked, verdict), *_ = ranks.outcomes(2, verified_with, fault, tables, str(folder))
    if quantity == "refused":
        assert not worked, verdict["sentence"]
        assert "UserCodeError" in verdict
        assert name in verdict.rpartition("UserCodeError")[2]
        return
    assert worked, verdict
    assert not verdict["holds"]
    assert verdict["first"]["quantity"] == quantity, verdict["sentence"]
    assert name in verdict["first"]["name"], verdict["sentence"]


def test_a_verdict_says_how_to_narrow_down(tmp_path: Path) -> None:
    """Each key that it names changes one thing; with one thing only, there is nothing to change."""
    run_file = run_file_of(tmp_path, pipeline={"microbatches": 4, "schedule": "ZBVZeroBubble"})
    assert narrowing(run_file, Layout(pipeline=2, tensor=2)) == (
        '. To find out where, change one key at a time: pipeline.microbatches=1, pipeline.schedule="GPipe", '
        "layout.pipeline=1, layout.tensor=1"
    )
    assert narrowing(run_file_of(tmp_path), Layout(shard=2)) == ""
    assert narrowing(run_file_of(tmp_path, batch={"micro_samples": 2}), Layout(shard=2)).endswith(
        "batch.micro_samples=8"
    )


@pytest.mark.parametrize("fault", [*PLANTED, *ON_ONE_RANK])
def test_a_mistake_still_has_its_place(fault: str) -> None:
    """What it changes is there under the name that it asks for: `make test` sees where a rename has spoilt one."""
    with plant_of(fault)(1):
        pass


def test_there_are_more_than_forty_of_them() -> None:
    """In models of Shoal's own, of users and of transformers."""
    every = {**PLANTED, **ON_ONE_RANK}
    kinds = {tables.get("model", {}).get("kind", "gpt") for tables, _, _ in every.values()}
    assert len(every) == len(PLANTED) + len(ON_ONE_RANK) > 40
    assert kinds >= {"gpt", "moe", "python", "transformers"}
