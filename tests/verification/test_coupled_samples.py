"""`verify` finds losses that couple samples: its reference takes the whole batch through one forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.verification.coupled_models import GROUP
from tests.verification.layouts import corpus, verified

HERE = "tests.verification.coupled_models"
CONTRASTIVE: dict[str, Any] = {
    "model": {"kind": "python", "build": f"{HERE}:build", "arguments": {"name": "contrastive"}},
    "data": {"kind": "python", "build": f"{HERE}:pairs"},
    "loss": {"kind": "python", "build": f"{HERE}:contrastive_loss"},
    "batch": {"global_samples": 8, "denominator": "samples"},
}


def _python(name: str, **tables: Any) -> dict[str, Any]:
    return {"model": {"kind": "python", "build": f"{HERE}:build", "arguments": {"name": name}}, **tables}


COUPLED: dict[str, dict[str, Any]] = {
    "contrastive": CONTRASTIVE,
    "batch_norm": _python("batch_norm"),
    "router": _python("router", loss={"kind": "python", "build": f"{HERE}:router_loss"}),
    "bilstm": _python("bilstm", data={"kind": "python", "build": "tests.verification.user_models:ragged"}),
}
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {"layout": {"shard": 2}}),
    "replicate": (2, {"layout": {"replicate": 2}}),
    "micro_samples": (1, {"batch": {"micro_samples": 3}}),
}


def _tables(model: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
    return {**model, **cut, "batch": {**model.get("batch", {}), **cut.get("batch", {})}}


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", COUPLED)
def test_a_loss_that_couples_samples_is_found_and_named(ranks, tmp_path: Path, model: str, cut: str) -> None:
    """Whatever cuts the batch computes another loss; the verdict says so, names a sample and the way out."""
    corpus(tmp_path)
    size, tables = CUTS[cut]
    verdict, *_ = ranks(size, verified, _tables(COUPLED[model], tables), str(tmp_path), False, 1)
    assert not verdict["holds"]
    assert verdict["first"]["quantity"] == "neighbours", verdict["sentence"]
    assert "the loss changes with its batch: that of sample" in verdict["sentence"]
    assert "model.group_samples" in verdict["sentence"]


@pytest.mark.parametrize("model", COUPLED)
def test_a_batch_that_nothing_cuts_is_the_same_model(ranks, tmp_path: Path, model: str) -> None:
    """Samples may see each other where all are in one forward."""
    corpus(tmp_path)
    (verdict,) = ranks(1, verified, _tables(COUPLED[model], {}), str(tmp_path), False, 2)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.parametrize("layout", [{"shard": 2}, {"replicate": 2}, {"replicate": 1}], ids=str)
def test_stated_groups_make_a_contrastive_model_independent_of_the_layout(
    ranks, tmp_path: Path, layout: dict[str, int]
) -> None:
    """No rank and no microbatch cuts a group, so every layout computes the same sum over groups."""
    grouped = CONTRASTIVE | {"model": CONTRASTIVE["model"] | {"group_samples": GROUP}, "layout": layout}
    verdict, *_ = ranks(2 if 2 in layout.values() else 1, verified, grouped, str(tmp_path), False, 2)
    assert verdict["holds"], verdict["sentence"]
