"""No false alarm: models that are right as they are pass `verify`, and nothing about them had to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.huggingface import architectures
from tests.verification import zoo
from tests.verification.layouts import corpus, verified

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate, microbatches": {"layout": {"replicate": 2}, "batch": {"micro_samples": 3}},
    "ZeRO-3": {"layout": {"shard": 2}},
    "ZeRO-1, recomputed": {"layout": {"shard": 2}, "memory": {"zero": 1, "recompute": "full"}},
}
QUICK = {("U-Net", "ZeRO-3"), ("graph", "replicate, microbatches"), ("BertForMaskedLM", "replicate, microbatches"),
         ("patches", "ZeRO-1, recomputed")}  # fmt: skip


def test_there_are_thirty_of_them() -> None:
    """Of users and of transformers."""
    assert len(set(zoo.EVERY)) == len(zoo.OWN) + len(zoo.PUBLISHED) >= 30


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}, {layout}", marks=() if (name, layout) in QUICK else pytest.mark.stress)
        for name in zoo.EVERY
        for layout in LAYOUTS
        if "recomputed" not in layout or name in zoo.HAVE_BLOCKS
    ],
)
def test_a_right_model_is_never_called_wrong(ranks, tmp_path: Path, name: str, layout: str) -> None:
    """Loss, norm, every gradient, the weights and buffers of two steps are those of one process."""
    if name in zoo.PUBLISHED:
        pytest.importorskip("transformers")
    corpus(tmp_path)
    verdict, _ = ranks(2, verified, zoo.tables(name) | LAYOUTS[layout], str(tmp_path), False, 2)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("ResNet") else pytest.mark.stress) for name in zoo.SEEING]
)
@pytest.mark.parametrize("layout", ["replicate", "ZeRO-3"])
def test_right_models_of_pictures_are_never_called_wrong(ranks, tmp_path: Path, name: str, layout: str) -> None:
    """Those with batch norms, over groups of samples, in float64: their running statistics are compared too."""
    pytest.importorskip(name.partition(" ")[0] if " " in name else "transformers")
    corpus(tmp_path)
    split = {"layout": {"replicate": 2}} if layout == "replicate" else {"layout": {"shard": 2}}
    verdict, _ = ranks(2, verified, zoo.seeing_tables(name) | split, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.stress
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_encoders_with_decoders_are_never_called_wrong(ranks, tmp_path: Path, name: str, layout: str) -> None:
    """With their default dropout, on pairs of sequences and on sounds."""
    pytest.importorskip("transformers")
    verdict, _ = ranks(2, verified, architectures.TABLES[name] | LAYOUTS[layout], str(tmp_path), False, 2)
    assert verdict["holds"], verdict["sentence"]
