"""First values of a rank's part are those of the model that is built whole; no rank builds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from shoal.assembly.objects import UserObjects, model_of
from shoal.assembly.run import Run, open_run
from shoal.launcher.environment import Place
from shoal.memory.recompute import Recomputed
from shoal.runfile.run_file import RunFile
from tests.ranks import TestPlace
from tests.verification.layouts import MOE, corpus, run_file_of

LLAMA = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "own": {"kind": "gpt", "vocabulary": 256, "layers": 2, "width": 128, "heads": 4, "tied": True},
    "llama": {"kind": "transformers", "architecture": "LlamaForCausalLM", "config": LLAMA},
    "function": {"kind": "python", "build": "tests.assembly.test_first_values:built"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, {"layout": {"shard": 2}}),
    "zero 3 of replicas": (4, {"layout": {"shard": 2, "replicate": 2}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}, "pipeline": {"microbatches": 2}}),
    "on the host": (1, {"memory": {"offload": {"parameters": "host", "optimizer": "host"}}}),
}


class Layered(nn.Module):
    """A user's: layers in a list, which holds one of them elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 128)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 160), nn.GELU(), nn.Linear(160, 128)) for _ in "ab")
        nn.init.orthogonal_(next(self.blocks.parameters()))
        self.head = nn.Linear(128, 256)
        self.elsewhere = [self.head.bias]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[samples, tokens]` to logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) + 0 * self.elsewhere[0].sum()


def built() -> nn.Module:
    """The function that a run file names."""
    return Layered()


def _tables(folder: Path, model: dict[str, Any], layout: dict[str, Any]) -> RunFile:
    run_file = run_file_of(folder, model=model, **layout)
    return msgspec.structs.replace(run_file, precision=msgspec.structs.replace(run_file.precision))


def _opened(place: TestPlace, run_file: RunFile) -> Run:
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    return open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)


def _losses(place: TestPlace, run_file: RunFile) -> list[float]:
    """Of three steps."""
    return _losses_and_kept(place, run_file)[0]


def _losses_and_kept(place: TestPlace, run_file: RunFile) -> tuple[list[float], bool]:
    """Of three steps; and whether blocks keep something for their backwards, and not all, by a budget."""
    run = _opened(place, run_file)
    feed = run.feed()
    try:
        losses = [run.step(number, feed.next().microbatches, lr=1e-3).loss for number in (1, 2, 3)]
        forwards = [module.__dict__.get("forward") for module in run.model.modules()]
        budgets = [each.budget for each in forwards if isinstance(each, Recomputed) and each.budget is not None]
        return losses, any(budget.kept_bytes and not budget.keeps_all for budget in budgets)
    finally:
        feed.close()
        run.end()


def _compared(place: TestPlace, run_file: RunFile) -> tuple[int, int, str | None]:
    """(numbers of this rank that are those of the whole model, those that are not, why it was built whole)"""
    torch.set_num_threads(1)
    run = _opened(place, run_file)
    dtype = run.workload.dtype
    whole = dict(model_of(run_file, UserObjects(), device=torch.device("cpu"), dtype=dtype).named_parameters())
    same = other = 0
    for owned in run.generation.gradients.owned:
        for box, numbers in owned.boxes(owned.parameter.detach()):
            equal = torch.equal(numbers, whole[owned.name].detach()[box.slices])
            same, other = same + equal * box.numel, other + (not equal) * box.numel
    why = run.workload.whole
    run.end()
    return same, other, why


ROWS = [(model, layout) for model in MODELS for layout in LAYOUTS if model != "function" or "zero" in layout]


@pytest.mark.matrix(rows=(0, 5, 7, 10))
@pytest.mark.parametrize(("model", "layout"), ROWS)
def test_parts_have_the_values_of_the_whole(ranks: Any, tmp_path: Path, model: str, layout: str) -> None:
    """Of the parameters that each rank updates, and together they are all of the model."""
    corpus(tmp_path)
    size, tables = LAYOUTS[layout]
    found = ranks(size, _compared, _tables(tmp_path, MODELS[model], tables))
    assert [(other, why) for _, other, why in found] == [(0, None)] * size
    whole = model_of(
        _tables(tmp_path, MODELS[model], {}), UserObjects(), device=torch.device("cpu"), dtype=torch.float32
    )
    assert sum(same for same, _, _ in found) >= sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_a_folder_is_read_by_parts(ranks: Any, tmp_path: Path, kept: str) -> None:
    """Weights in files of several shards, as they are saved or in half precision."""
    transformers = pytest.importorskip("transformers")
    corpus(tmp_path)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(getattr(torch, kept))
    model.save_pretrained(tmp_path / "llama", max_shard_size="200KB")
    table = {"kind": "transformers", "folder": str(tmp_path / "llama")}
    found = ranks(2, _compared, _tables(tmp_path, table, {"layout": {"shard": 2}}))
    assert [(other, why) for _, other, why in found] == [(0, None)] * 2


def test_a_step_is_that_of_a_model_built_whole(ranks: Any, tmp_path: Path) -> None:
    """A user's model that holds a parameter in a plain list, too, under ZeRO-3."""
    corpus(tmp_path)
    by_parts, whole = (
        ranks(2, _losses, _tables(tmp_path, MODELS["llama"], {"layout": {"shard": 2}, "memory": {"build": build}}))
        for build in ("parts", "whole")
    )
    assert by_parts == whole
    assert np.isfinite(by_parts[0]).all()


ON_TWO: dict[str, dict[str, Any]] = {
    "zero 3": {"layout": {"shard": 2}, "budget": "1000 KiB"},
    "pipeline": {
        "model": MODELS["own"] | {"layers": 4},
        "layout": {"pipeline": 2},
        "pipeline": {"microbatches": 2},
        "budget": "1400 KiB",
    },
    "tensor": {"layout": {"tensor": 2}, "budget": "1000 KiB"},
    "sequence": {"layout": {"tensor": 2, "sequence_parallel": True}, "budget": "1000 KiB"},
    "context": {"layout": {"context": 2}, "budget": "1000 KiB"},
    "expert": {"model": MOE, "layout": {"shard": 2, "expert": 2}, "budget": "230 KiB"},
}
"""From `tensor` on, blocks exchange something with other ranks, and once more when they are computed again. Of experts,
each rank alone would keep another block.
"""


@pytest.mark.parametrize(
    "layout", [name if name == "zero 3" else pytest.param(name, marks=pytest.mark.slow) for name in ON_TWO]
)
def test_recompute_by_budget_is_the_same_to_the_last_bit(ranks: Any, tmp_path: Path, layout: str) -> None:
    """Losses of three steps on two ranks: blocks are looked at in the first, and keep a part from the second on."""
    corpus(tmp_path)
    tables = {"model": MODELS["own"], **ON_TWO[layout]}
    model, size = tables.pop("model"), tables.pop("budget")
    budget = {"recompute": "budget", "recompute_budget": size}
    kept = ranks(2, _losses_and_kept, _tables(tmp_path, model, {**tables, "memory": budget}))
    wanted = ranks(2, _losses, _tables(tmp_path, model, tables))
    assert [losses for losses, _ in kept] == wanted
    assert any(in_part for _, in_part in kept), "else this shows nothing"


def asks_for_memory() -> nn.Module:
    """Its numbers go through numpy."""
    model = Layered()
    model.head.bias.data.fill_(float(model.head.weight.detach().numpy().mean()))
    return model


def test_a_model_that_needs_its_memory_says_so(ranks: Any, tmp_path: Path) -> None:
    """It is built whole, or refused where the run file wants no such thing."""
    corpus(tmp_path)
    model = {"kind": "python", "build": "tests.assembly.test_first_values:asks_for_memory"}
    shard: dict[str, Any] = {"layout": {"shard": 2}}
    found = ranks(2, _compared, _tables(tmp_path, model, shard))
    for _, other, why in found:
        assert (other, why is None) == (0, False)
        assert "every rank builds the whole model" in str(why)
    refused = ranks.outcomes(2, _compared, _tables(tmp_path, model, shard | {"memory": {"build": "parts"}}))
    assert all(not worked and "numpy" in text for worked, text in refused)
