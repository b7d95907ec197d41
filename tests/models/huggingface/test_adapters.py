"""LoRA: what is frozen has no optimizer state, sends nothing and stays; what is trained is peft's own computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shoal.errors import ConfigError
from shoal.models.huggingface.build import build
from shoal.models.huggingface.config import TransformersConfig
from tests.models.huggingface.architectures import ADAPTED, LLAMA
from tests.verification.layouts import corpus, run_file_of

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LORA = LLAMA | ADAPTED
SMALL_CHANGE_BYTES = 4096
"""Counts, votes and norms of one step."""


def stepped(place, tables: dict[str, Any], folder: str) -> dict[str, Any]:
    """One step: the numbers trained and held, the optimizer's tensors, bytes sent, and which frozen weights changed."""
    from shoal.assembly.run import open_run
    from shoal.data.cursor import Cursor
    from shoal.launcher.environment import Place

    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    run = open_run(run_file_of(Path(folder), **tables), here, store=place.store)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if not p.requires_grad}
    with run.feed(Cursor()) as feed:
        result = run.step(1, feed.next().microbatches, lr=0.1)
    frozen = {name: p.detach() for name, p in run.model.named_parameters() if not p.requires_grad}
    names = sorted({name for name in run.state.tensors() if name.startswith("optimizer/")})
    return {
        "trained": sum(t.parameter.numel() for t in run.trained),
        "frozen": sum(p.numel() for p in frozen.values()),
        "moved": [name for name in frozen if not torch.equal(frozen[name], before[name])],
        "gradients": [name for name, p in run.model.named_parameters() if not p.requires_grad and p.grad is not None],
        "optimizer": names,
        "saved": sorted(name for name in run.state.tensors() if name.startswith("model/")),
        "sent": result.bytes_sent,
    }


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}])
def test_frozen_layers_keep_no_state_and_send_no_bytes(ranks, tmp_path: Path, axes: dict[str, int]) -> None:
    """A step's bytes are those of the adapters: under ZeRO-3 they travel three times, a frozen weight never."""
    corpus(tmp_path)
    tables = {"model": LORA, "layout": axes}
    first, _ = ranks(2, stepped, tables, str(tmp_path))
    adapter_bytes = 4 * sum(
        p.numel() for p in build(msgspec.convert(LORA, TransformersConfig)).parameters() if p.requires_grad
    )
    assert first["frozen"] * 4 > 4 * adapter_bytes
    assert adapter_bytes / 2 < first["sent"] < 2 * adapter_bytes + SMALL_CHANGE_BYTES
    assert first["optimizer"]
    assert all("lora_" in name or name.count("/") == 1 for name in first["optimizer"])
    assert first["moved"] == first["gradients"] == []
    assert any("lora_A" in name for name in first["saved"])
    assert any("base_layer" in name for name in first["saved"])


def kept_by(table: dict[str, Any]) -> list[int]:
    """Bytes that a forward keeps for the backward, layer by layer; parameters do not count."""
    torch.manual_seed(3)
    model = build(msgspec.convert(table, TransformersConfig))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[int] = []

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        if kept and tensor.untyped_storage().data_ptr() not in own:
            kept[-1] += tensor.untyped_storage().nbytes()
        return tensor

    def enter(*_: object) -> None:
        kept.append(0)

    for layer in model.get_submodule("model.layers"):
        layer.register_forward_pre_hook(enter)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        model(torch.arange(3, 15)[None])
    return kept


def test_frozen_layers_keep_no_activations() -> None:
    """Below the first adapter nothing is kept for the backward, and above it less than where all layers train."""
    own, last = kept_by(LLAMA), kept_by(LLAMA | {"lora_rank": 4, "lora_targets": ["model.layers.1.mlp.down_proj"]})
    assert len(own) == len(last) == 3
    assert last[0] == 0
    assert 0 < last[1] < own[1] / 4
    assert 0 < last[2] < own[2]


def test_the_model_with_adapters_is_pefts() -> None:
    """The same names trained, and the same logits, as peft's own way of putting adapters on transformers' model."""
    import transformers

    torch.manual_seed(3)
    model = build(msgspec.convert(LORA, TransformersConfig)).eval()
    torch.manual_seed(3)
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA["config"]))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED["lora_targets"])
    own = peft.get_peft_model(own, config).eval()
    for parameters in (dict(model.named_parameters()), dict(own.named_parameters())):
        for name, parameter in parameters.items():
            if "lora_B" in name:
                parameter.data.fill_(0.01)
    tokens = torch.arange(3, 15)[None]
    assert torch.equal(model(tokens).logits, own(input_ids=tokens).logits)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {n.removeprefix("base_model.model.") for n, p in own.named_parameters() if p.requires_grad}


def test_targets_that_no_layer_has_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_targets = \['query'\].*q_proj"):
        build(msgspec.convert(LORA | {"lora_targets": ["query"]}, TransformersConfig))
