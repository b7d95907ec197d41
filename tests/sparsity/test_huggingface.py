"""A decoder of transformers under masks, with adapters, frozen layers and rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.assembly.objects import UserObjects, model_of
from shoal.checkpoint.inspect import weights_of
from shoal.cli.checkpoint import export
from shoal.config.load import dumps
from tests.assembly.training_ranks import trained as taken
from tests.sync.steps import ADAM, SGD, gap, train
from tests.verification.layouts import corpus, run_file_of

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_in_the_weights_that_transformers_loads(ranks, tmp_path: Path, kind: str) -> None:
    """What the adapted model computes, its class computes without adapters."""
    corpus(tmp_path)
    adapter = TABLES["lora"]["adapter"] | {"kind": kind}
    tables = ADAM | SGD | {"model": LLAMA, "adapter": adapter}
    ranks(1, taken, tables, str(tmp_path), 4)
    run_file = run_file_of(tmp_path, **tables)
    (tmp_path / "run" / "run.toml").write_text(dumps(run_file))
    export(tmp_path / "run", tmp_path / "exported", to="huggingface")
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.float64
    )
    ours = model_of(run_file, UserObjects(), device=torch.device("cpu"), dtype=torch.float64)
    ours.load_state_dict(weights_of(tmp_path / "run"), strict=False)
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ours.eval()(tokens).logits, theirs(tokens).logits, rtol=1e-9, atol=1e-12)
    assert float(weights_of(tmp_path / "run")["model.layers.0.self_attn.q_proj.lora_b"].abs().max()) > 0


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
