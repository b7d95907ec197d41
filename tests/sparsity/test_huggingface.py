"""A decoder of transformers under masks, with adapters, frozen layers and rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sync.steps import ADAM, SGD, gap, train
from tests.verification.layouts import corpus

LLAMA: dict[str, Any] = {
    "kind": "transformers",
    "architecture": "LlamaForCausalLM",
    "config": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip
SHORT = {"begin": 2, "end": 4, "every": 1}
TABLES: dict[str, dict[str, Any]] = {
    "rigl": {"sparsity": {"kind": "rigl", "density": 0.2, "schedule": {"every": 2, "end": 5}}},
    "features": {
        "sparsity": {
            "kind": "magnitude", "pattern": "features", "density": 0.5, "layers": ["*.mlp.*"], "schedule": SHORT,
        }
    },
    "lora": {"adapter": {"kind": "lora", "rank": 2, "layers": ["*.q_proj", "*.v_proj"]}},
    "frozen": {"freeze": {"layers": ["model.embed_tokens", "model.layers.0"]}},
    "rounded": {"quantisation": {"bits": 8}},
}  # fmt: skip
LAYOUTS = {"ZeRO-3": {"shard": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}


@pytest.mark.stress
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TABLES)
def test_every_layout_trains_it_as_one_process(ranks, tmp_path: Path, kind: str, layout: str) -> None:
    """Masks in every bit, weights but for the order of sums."""
    if layout == "tensor" and kind in ("lora", "rounded"):
        pytest.skip("layers that ranks split are refused there")
    corpus(tmp_path)
    tables = ADAM | SGD | {"model": LLAMA} | TABLES[kind]
    wanted = ranks(1, train, tables, str(tmp_path), 0, 6)[0]
    found = ranks(2, train, tables | {"layout": LAYOUTS[layout]}, str(tmp_path), 0, 6)[0]
    masks = [name for name in wanted.state if name.startswith("sparsity/mask/")]
    assert bool(masks) == ("sparsity" in TABLES[kind])
    assert all(torch.equal(found.state[name], wanted.state[name]) for name in masks)
    trained = {name for name, tensor in wanted.weights.items() if tensor.any()}
    ours, theirs = ({n: t for n, t in one.weights.items() if n in trained} for one in (found, wanted))
    assert gap(ours, theirs) < 1e-10
