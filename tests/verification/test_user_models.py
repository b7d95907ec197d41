"""Modules of users, as models look in the wild, are the same model in every layout that they allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.verification.layouts import GPT, corpus, verified

BIASED = {"kind": "python", "build": "tests.verification.user_models:biased"}
STRIDED = {"kind": "python", "build": "tests.verification.user_models:strided"}
DIRECT = STRIDED | {"arguments": {"direct": True}}

LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (BIASED, {"layout": {"tensor": 2}}),
    (BIASED, {"layout": {"tensor": 2, "sequence_parallel": True}}),
    (BIASED, {"layout": {"shard": 2}}),
    (STRIDED, {"layout": {"replicate": 2}}),
    (STRIDED, {"layout": {"shard": 2}}),
    (STRIDED, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    (DIRECT, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
]


@pytest.mark.parametrize(("model", "tables"), LAYOUTS, ids=str)
def test_a_users_module_is_the_same_model(ranks, tmp_path: Path, model: dict[str, Any], tables: dict[str, Any]) -> None:
    """Biases, transposed weights, lists of lists: `verify` holds."""
    corpus(tmp_path)
    verdict, _ = ranks(2, verified, {"model": model, **tables}, str(tmp_path), False, 2)
    assert verdict["holds"], verdict["sentence"]


def test_a_block_that_is_not_called_is_refused_under_zero_3(ranks, tmp_path: Path) -> None:
    """Its parameters are not there when they are read directly; the sentence names one, and the way out."""
    corpus(tmp_path)
    outcomes = ranks.outcomes(2, verified, {"model": DIRECT, "layout": {"shard": 2}}, str(tmp_path), False, 1)
    said = [str(value) for worked, value in outcomes if not worked]
    assert any("flat.0.weight" in text and "memory.zero = 2" in text for text in said), said


@pytest.mark.parametrize("layout", [{"expert": 2, "shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}])
def test_a_module_that_does_not_declare_what_an_axis_needs_is_refused(
    ranks, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """By a sentence that names the class and the way out."""
    corpus(tmp_path)
    outcomes = ranks.outcomes(2, verified, {"model": STRIDED, "layout": layout}, str(tmp_path), False, 1)
    assert all(not worked and "UserCodeError" in str(value) and "Strided" in str(value) for worked, value in outcomes)


RAGGED = {"kind": "python", "build": "tests.verification.user_models:ragged"}
RAGGED_PIPELINES: list[dict[str, Any]] = [
    {"pipeline": {"schedule": "1F1B"}, "layout": {"pipeline": 2}},
    {"pipeline": {"schedule": "DualPipeV", "microbatches": 8}, "layout": {"pipeline": 2}},
    {"pipeline": {"schedule": "PipeDream"}, "layout": {"pipeline": 2}},
    {"pipeline": {"schedule": "1F1B"}, "layout": {"pipeline": 2, "context": 2}},
]


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("tables", RAGGED_PIPELINES, ids=str)
def test_microbatches_of_a_pipeline_may_be_of_different_lengths(ranks, tmp_path: Path, tables: dict[str, Any]) -> None:
    """Nothing is padded: the forms of activations follow from those of the inputs, which every rank knows."""
    tables = {
        "data": RAGGED, "model": GPT | {"layers": 4}, "batch": {"global_samples": 8, "micro_samples": 1}, **tables
    }  # fmt: skip
    corpus(tmp_path)
    size = tables["layout"].get("context", 1) * 2
    verdict, *_ = ranks(size, verified, tables, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]
