"""Folders of transformers: what a run has trained goes out and comes in bit by bit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import torch
from torch import Tensor

from shoal.checkpoint.huggingface import _tensors, export_folder, import_folder
from shoal.checkpoint.weights import save_weights, weights_of
from shoal.cli.checkpoint import export
from shoal.errors import UsageError
from shoal.models.huggingface.build import build, turn_off_caches
from shoal.models.huggingface.config import TransformersConfig
from tests import programs
from tests.models.huggingface.architectures import ADAPTED, LLAMA, RESNET, TABLES, TIED_LLAMA
from tests.verification.layouts import corpus

transformers = pytest.importorskip("transformers")

MODELS = {**{name: tables["model"] for name, tables in TABLES.items()}, "tied Llama": TIED_LLAMA}
TOKENS = torch.arange(3, 21).view(2, 9)
INPUTS: dict[str, dict[str, Tensor]] = {
    "ViT": {"pixel_values": torch.linspace(-1, 1, 512).view(2, 1, 16, 16)},
    "T5": {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
    "Whisper": {"input_features": torch.linspace(-1, 1, 384).view(2, 8, 24), "decoder_input_ids": TOKENS},
}


def checkpoint_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """A run directory with the model's weights, and these, tied ones once."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_weights(weights, Path("test"), folder)
    return weights


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_out_and_in_is_the_checkpoint_bit_by_bit(tmp_path: Path, name: str) -> None:
    """transformers loads it with no weight of its own, and computes the same logits, without caches."""
    table = msgspec.convert(MODELS[name], TransformersConfig)
    model = build(table).eval()
    weights = checkpoint_of(model, tmp_path / "run")
    assert export_folder(tmp_path / "run", tmp_path / "out", table) == 0
    architecture = getattr(transformers, MODELS[name]["architecture"])
    loaded, told = architecture.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = dict(loaded.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    inputs = INPUTS.get(name, {"input_ids": TOKENS})
    turn_off_caches(loaded)
    assert torch.equal(loaded.eval()(**inputs).logits, model(**inputs).logits)
    import_folder(tmp_path / "out", tmp_path / "in")
    again = weights_of(tmp_path / "in")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[key], weights[key]) for key in weights)


def test_a_model_whose_batch_norms_were_replaced_goes_out(tmp_path: Path) -> None:
    """Its running statistics too; such a norm counts no batches, and transformers' own count stays 0."""
    table = msgspec.convert(RESNET, TransformersConfig)
    model = build(table).eval()
    weights = {n: t + 1 for n, t in _tensors(model).items() if not n.endswith("num_batches_tracked")}
    save_weights(weights, Path("test"), tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out", table)
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in weights.items())


def test_what_is_there_is_kept_and_another_model_is_refused(tmp_path: Path) -> None:
    """No half of a folder is left."""
    llama = msgspec.convert(LLAMA, TransformersConfig)
    checkpoint_of(build(llama), tmp_path / "run")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="there exists"):
        export_folder(tmp_path / "run", tmp_path / "there", llama)
    with pytest.raises(
        UsageError, match=r"is not of LlamaForCausalLM: its tensor lm_head\.weight is \(61, 32\), and the"
    ):
        export_folder(tmp_path / "run", tmp_path / "out", msgspec.convert(TIED_LLAMA, TransformersConfig))
    with pytest.raises(UsageError, match="holds checkpoints of a run"):
        import_folder(tmp_path / "run", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


def shoal(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return programs.run(["-m", "shoal", *arguments], cwd=folder)


@pytest.mark.slow
def test_adapters_trained_on_two_ranks_are_loaded_by_peft(tmp_path: Path) -> None:
    """`shoal train` from a folder, `shoal checkpoint export`: peft's model has its adapters, which moved."""
    peft = pytest.importorskip("peft")
    corpus(tmp_path)
    torch.manual_seed(5)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA["config"]))
    base.save_pretrained(tmp_path / "base")
    run = {
        "run": {"name": "lora", "steps": 2, "processes": 2},
        "model": {"kind": "transformers", "folder": "base", **ADAPTED},
        "data": {"kind": "tokens", "path": "tokens.bin", "dtype": "uint8"},
        "batch": {"global_samples": 4, "sequence": 16},
        "layout": {"tensor": 2},
        "observe": {"report": False},
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    trained = shoal("train", "run.toml", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    out = shoal("checkpoint", "export", "runs/lora", "adapters", "--to", "huggingface", "--json", folder=tmp_path)
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout) == {"step": 2, "file": "adapters"}
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    found = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    weights = weights_of(tmp_path / "runs/lora")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert any(bool(weights[name].any()) for name in weights if "lora_B" in name)


@pytest.mark.parametrize("adapter", [{"kind": "bottleneck", "width": 2}, {"kind": "prompt", "tokens": 2}], ids=str)
def test_adapters_that_are_no_weights_of_transformers_stay_in_a_file(tmp_path: Path, adapter: dict[str, Any]) -> None:
    """The refusal names them."""
    checkpoint_of(build(msgspec.convert(LLAMA, TransformersConfig)), tmp_path / "run")
    run = {
        "run": {"name": "adapted", "steps": 2},
        "model": LLAMA,
        "adapter": adapter,
        "data": {"kind": "tokens", "path": "tokens.bin", "dtype": "uint8"},
        "batch": {"global_samples": 4, "sequence": 16},
    }
    (tmp_path / "run" / "run.toml").write_text(tomli_w.dumps(run))
    with pytest.raises(UsageError, match=f'adapter.kind = "{adapter["kind"]}", which cannot be merged'):
        export(tmp_path / "run", tmp_path / "out", to="huggingface")
