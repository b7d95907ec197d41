"""Models of transformers and of users under masks, with adapters, frozen layers and rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.assembly.objects import UserObjects, model_of
from shoal.checkpoint.weights import weights_of
from shoal.cli.checkpoint import export
from shoal.config.load import dumps
from tests.assembly.journey import Leg, travel
from tests.assembly.training_ranks import trained as taken
from tests.models.huggingface.architectures import GPT2, GPT_OSS, MIXTRAL, RESNET, data
from tests.models.huggingface.architectures import TABLES as MODELS
from tests.sparsity.test_training import masks_in
from tests.sync.steps import ADAM, SGD, Trained, gap, train
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


# Models that Shoal did not write, beside one process.

GRADUAL = {"begin": 2, "end": 6, "every": 2}
MASKS: dict[str, dict[str, Any]] = {
    "rows": {"kind": "magnitude", "pattern": "rows", "density": 0.5, "schedule": GRADUAL},
    "columns, global": {
        "kind": "snip", "pattern": "columns", "density": 0.5, "distribution": "global", "schedule": GRADUAL,
    },
    "2:4": {"kind": "movement", "pattern": "2:4", "schedule": GRADUAL},
    "2:4, both ways": {"kind": "magnitude", "pattern": "2:4", "transposable": True, "schedule": GRADUAL},
    "blocks": {"kind": "random", "pattern": "block", "block": [2, 4], "density": 0.5, "schedule": GRADUAL},
    "grasp": {"kind": "grasp", "density": 0.3, "schedule": {"begin": 2, "shape": "one_shot"}},
    "l0": {"kind": "l0", "density": 0.3, "schedule": {"begin": 2, "end": 6}},
    "set, rows": {"kind": "set", "pattern": "rows", "density": 0.5, "schedule": {"every": 2, "end": 6}},
    "rigl": {"kind": "rigl", "density": 0.2, "distribution": "erk", "schedule": {"every": 2, "end": 6}},
    "top_kast": {"kind": "top_kast", "density": 0.2, "trained": 0.4, "schedule": {"every": 2, "end": 6}},
}  # fmt: skip
HERE = "tests.sparsity.test_foreign_models"
FOREIGN: dict[str, dict[str, Any]] = {
    "GPT-2": {"model": GPT2 | {"config": GPT2["config"] | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}}},
    "Mixtral": {"model": MIXTRAL},
    "GPT-OSS": {"model": GPT_OSS},
    "BERT": MODELS["BERT"],
    "T5": MODELS["T5"],
    "ViT": MODELS["ViT"],
    "ResNet": {"model": RESNET | {"batch_norm": "synchronised"}, "data": data("pictures")},
    "own": {
        "model": {"kind": "python", "build": f"{HERE}:Convolutions", "batch_norm": "synchronised"},
        "data": data("pictures"),
    },
}
"""Weights `[in, out]`, stacked experts, turned ones with biases, ties, batch norms, convolutions of all kinds."""
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate": (2, {"layout": {"replicate": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}}),
    "tensor": (2, {"layout": {"tensor": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
    "expert": (2, {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}}),
}


class Convolutions(nn.Module):
    """Depthwise, grouped and transposed convolutions, a norm of pictures, a module in two places, and factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.depthwise, self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1, groups=2)
        self.batch, self.picture = nn.BatchNorm2d(8), nn.LayerNorm([8, 8, 8])
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.position_table = nn.Parameter(torch.zeros(8, 8))
        self.up, self.both = nn.ConvTranspose2d(8, 16, 2, stride=2, groups=2), nn.Linear(16, 16)
        self.again = self.both
        self.bags, self.last = nn.EmbeddingBag(4, 16), nn.Linear(16, 8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.picture(self.batch(self.first(inputs))) + self.position_table
        hidden = hidden + self.scale * self.grouped(self.depthwise(hidden)).relu()
        pooled = self.up(hidden).relu().mean((2, 3)) + self.bags(torch.zeros(len(inputs), 1, dtype=torch.int64))
        return self.classifier(self.last(self.again(self.both(pooled).relu())).relu())


def masks_of(one: Trained) -> dict[str, Tensor]:
    """By name, in the shapes of the weights."""
    return masks_in(one.state)


def density_of(masks: dict[str, Tensor]) -> float:
    return sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


def test_what_nothing_is_multiplied_with_stays_dense(ranks, tmp_path: Path) -> None:
    """Norms of pictures, embedding bags, tables of positions, factors, and what several modules share."""
    tables = ADAM | SGD | FOREIGN["own"] | {"sparsity": MASKS["l0"] | {"schedule": {"begin": 1, "end": 2}}}
    found = masks_of(ranks(1, train, tables, str(tmp_path), 0, 3)[0])
    assert {*found} == {"first.weight", "depthwise.weight", "grouped.weight", "up.weight", "last.weight"}


@pytest.mark.parametrize("model", ["Mixtral", "GPT-OSS"])
def test_routers_and_biases_of_experts_stay_dense(ranks, tmp_path: Path, model: str) -> None:
    corpus(tmp_path)
    found = masks_of(ranks(1, train, ADAM | SGD | FOREIGN[model] | {"sparsity": MASKS["rows"]}, str(tmp_path), 0, 3)[0])
    assert any(".experts." in name for name in found)
    assert not [name for name in found if "bias" in name or "router" in name or ".gate." in name]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GPT-2", "Mixtral", "GPT-OSS", "own"])
def test_rows_are_outputs_and_two_of_four_are_inputs(ranks, tmp_path: Path, model: str) -> None:
    """However a weight lies in its parameter: no expert is masked as a whole, and no input of GPT-2."""
    corpus(tmp_path)
    for kind in ("rows", "2:4, both ways"):
        found = masks_of(
            ranks(1, train, ADAM | SGD | FOREIGN[model] | {"sparsity": MASKS[kind]}, str(tmp_path), 0, 7)[0]
        )
        for name, mask in found.items():
            rows = outputs_first(model, name, mask).flatten(1)
            if kind == "rows":
                assert bool((rows.all(1) | ~rows.any(1)).all())
                assert 0 < int(rows.all(1).sum()) < len(rows)
            else:
                assert bool((rows.unflatten(1, (-1, 4)).sum(2) == 2).all())
            if mask.ndim == 3:
                assert bool(mask.flatten(1).any(1).all())


def outputs_first(model: str, name: str, mask: Tensor) -> Tensor:
    """`[outputs, inputs, ...]`, as the classes of these weights say they lie."""
    if model == "GPT-2":
        return mask.T
    if name == "up.weight":  # two groups of 4 inputs and 8 outputs
        return torch.cat([each.transpose(0, 1) for each in mask.chunk(2)])
    if mask.ndim == 3:
        return torch.cat([each.T if model == "GPT-OSS" else each for each in mask])
    return mask


def refusal(model: str, split: str) -> str:
    """A part of the sentence that refuses a layout, whatever the masks are."""
    if split == "tensor" and model != "Mixtral":
        return "tensor"
    if split == "pipeline" and model not in ("Mixtral", "GPT-OSS"):
        return "pipeline"
    return "expert" if split == "expert" and model not in ("Mixtral", "GPT-OSS") else ""


ESSENCE = [
    ("GPT-2", "rows", "ZeRO-3"), ("GPT-2", "2:4, both ways", "replicate"), ("Mixtral", "rows", "tensor"),
    ("Mixtral", "rigl", "pipeline"), ("GPT-OSS", "columns, global", "expert"), ("BERT", "grasp", "ZeRO-3"),
    ("ResNet", "rigl", "ZeRO-3"), ("own", "blocks", "ZeRO-3"), ("own", "top_kast", "replicate"),
    ("Mixtral", "l0", "tensor"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind", "split"), ESSENCE)
def test_foreign_models_have_the_masks_of_one_process(ranks, tmp_path: Path, model: str, kind: str, split: str) -> None:
    same_as_alone(ranks, tmp_path, model, kind, split)


@pytest.mark.stress
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("model", FOREIGN)
def test_every_kind_on_every_foreign_model(ranks, tmp_path: Path, model: str, kind: str, split: str) -> None:
    same_as_alone(ranks, tmp_path, model, kind, split)


def same_as_alone(ranks, folder: Path, model: str, kind: str, split: str) -> None:
    """Bit by bit, at the density that was asked for; weights but for the order of sums."""
    corpus(folder)
    tables, (world, layout) = ADAM | SGD | FOREIGN[model] | {"sparsity": MASKS[kind]}, SPLITS[split]
    if sentence := refusal(model, split):
        with pytest.raises(Exception, match=sentence):
            ranks(world, train, tables | layout, str(folder), 0, 1)
        return
    wanted = ranks(1, train, tables, str(folder), 0, 8)[0]
    found = ranks(world, train, tables | layout, str(folder), 0, 8)[0]
    ours, theirs = masks_of(found), masks_of(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], mask) for name, mask in theirs.items())
    assert density_of(ours) == pytest.approx(MASKS[kind].get("density", 0.5), abs=0.03)
    for name, tensor in wanted.weights.items():  # what has no gradient but by rounding, as biases of keys, is near zero
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "there", "here"), [("Mixtral", "l0", "tensor", "ZeRO-3"), ("own", "rigl", "ZeRO-3", "replicate")]
)
def test_foreign_models_resume_in_the_middle_of_a_schedule(
    ranks, tmp_path: Path, model: str, kind: str, there: str, here: str
) -> None:
    """In every bit in the same world, and in another one with every bit of what was saved."""
    corpus(tmp_path)

    def leg(split: str, name: str, steps: int) -> Leg:
        world, layout = SPLITS[split]
        tables = ADAM | FOREIGN[model] | {"sparsity": MASKS[kind]} | layout
        return ranks(world, travel, tables, str(tmp_path), name, steps)[0]

    whole = leg(there, "whole", 7)
    first, second = leg(there, "halves", 3), leg(there, "halves", 4)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.left[name], tensor) for name, tensor in whole.left.items())
    begun, gone_on = leg(there, "abroad", 3), leg(here, "abroad", 4)
    assert all(torch.equal(gone_on.came[name], tensor) for name, tensor in begun.left.items())
    ours, theirs = masks_in(gone_on.left), masks_in(whole.left)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], mask) for name, mask in theirs.items())
