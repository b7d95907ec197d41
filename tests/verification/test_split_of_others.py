"""What `shoal split` proposes for modules in other people's styles is the model of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.planning.split_proposal import SplitProposal, propose
from tests.verification.layouts import corpus, run_file_of, verified
from tests.verification.others_models import SIZES

HERE = "tests.verification.others_models"


def of_transformers(name: str) -> dict[str, Any]:
    return {"kind": "transformers", "architecture": name, "config": SIZES[name]}


def of_python(name: str) -> dict[str, Any]:
    if name in SIZES:
        return {"kind": "python", "build": f"{HERE}:built", "arguments": {"name": name}}
    return {"kind": "python", "build": f"{HERE}:{name}"}


IMAGES = {"data": {"kind": "python", "build": "tests.verification.undeclared_models:images"},
          "batch": {"global_samples": 8, "denominator": "samples"}}  # fmt: skip
PAIRS = {"data": {"kind": "python", "build": f"{HERE}:pairs"}}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": of_transformers("GPT2LMHeadModel")},
    "gpt2-python": {"model": of_python("GPT2LMHeadModel")},
    "bert": {"model": of_transformers("BertForMaskedLM")},
    "bert-python": {"model": of_python("BertForMaskedLM")},
    "llama-python": {"model": of_python("LlamaForCausalLM")},
    "vit": {"model": of_transformers("ViTForImageClassification"), **IMAGES},
    "t5": {"model": of_transformers("T5ForConditionalGeneration"), **PAIRS},
    "nano": {"model": of_python("nano")},
    "nano_with_heads": {"model": of_python("nano_with_heads")},
    "mixer": {"model": of_python("mixer"), **IMAGES},
}


def proposed(name: str, folder: Path) -> SplitProposal:
    if name not in ("nano", "nano_with_heads", "mixer"):
        pytest.importorskip("transformers")
    corpus(folder)
    return propose(run_file_of(folder, **MODELS[name], optimizer={"kind": "sgd", "lr": 0.1}))


@pytest.mark.matrix(every=1, often=4)
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_module_of_others_splits_as_proposed(ranks, tmp_path: Path, name: str, layout: dict[str, int]) -> None:
    """Loss, every gradient and the weights in float64."""
    keys = proposed(name, tmp_path).keys()
    own = MODELS[name] | {"optimizer": {"kind": "sgd", "lr": 0.1}}
    choice = own | {"model": own["model"] | keys, "layout": layout, "pipeline": {"microbatches": 2}}
    verdict, *_ = ranks(layout.get("tensor", 1) * layout.get("pipeline", 1), verified, choice, str(tmp_path), True, 1)
    assert verdict["holds"], verdict["sentence"]
