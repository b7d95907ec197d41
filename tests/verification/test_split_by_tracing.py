"""Modules that declare nothing, split as `shoal split` proposes, are the model of one process."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import nn

from shoal.errors import ConfigError, UserCodeError
from shoal.models.config import PythonModel
from shoal.parallel.traced.relay import declare, integer_attributes
from shoal.planning.split_proposal import SplitProposal, patterns_of, propose, write_keys
from tests.verification.layouts import corpus, run_file_of, verified
from tests.verification.undeclared_models import build

HERE = "tests.verification.undeclared_models"
MODULES = ["ResidualMLP", "Causal", "Gated", "PatchClassifier", "Convolutions", "PackedCausal"]
IMAGES = ["PatchClassifier", "Convolutions"]


def tables(name: str) -> dict[str, Any]:
    model = {"kind": "python", "build": f"{HERE}:build", "arguments": {"name": name}}
    data = {"data": {"kind": "python", "build": f"{HERE}:images"}} if name in IMAGES else {}
    batch = {"batch": {"global_samples": 8, "denominator": "samples"}} if name in IMAGES else {}
    return {"model": model, **data, **batch, "optimizer": {"kind": "sgd", "lr": 0.1}}


def proposed(name: str, folder: Path) -> SplitProposal:
    corpus(folder)
    return propose(run_file_of(folder, **tables(name)))


LAYOUTS: list[dict[str, int]] = [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_declares_nothing_splits_as_proposed(
    ranks, tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    """Loss, every gradient and the weights in float64."""
    keys = proposed(name, tmp_path).keys()
    assert keys["roles"]
    own = tables(name)
    choice = own | {"model": own["model"] | keys, "layout": layout, "pipeline": {"microbatches": 2}}
    size = layout.get("tensor", 1) * layout.get("pipeline", 1)
    verdict, *_ = ranks(size, verified, choice, str(tmp_path), True, 1)
    assert verdict["holds"], verdict["sentence"]


def test_the_proposal_names_pairs_counts_and_parts(tmp_path: Path) -> None:
    """A block's queries, keys and values are columns, its output rows; heads are shared; each block is a part."""
    found = proposed("Causal", tmp_path)
    first = {name: role for name, role in found.roles.roles.items() if name.startswith("blocks.0.")}
    columns = ["attention.q", "attention.k", "attention.v", "mlp.up"]
    assert first == {
        **{f"blocks.0.{name}.weight": "column" for name in columns},
        "blocks.0.attention.out.weight": "row",
        "blocks.0.mlp.down.weight": "row",
    }
    assert list(found.roles.counts) == [f"blocks.{i}.attention.heads" for i in range(3)]
    assert found.parts == ("embed", "places", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
    assert set(found.roles.whole) == {"head"}


GPT2 = {
    "kind": "python",
    "build": f"{HERE}:gpt2",
    "roles": {
        "*.c_attn.weight": "packed",
        "*.attn.c_proj.weight": "row",
        "*.c_fc.weight": "column",
        "*.mlp.c_proj.weight": "row",
    },
    "counts": ["transformer.h.0.attn.split_size", "transformer.h.1.attn.split_size"],
}


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "shard": 2}], ids=str)
def test_gpt2_splits_by_roles_of_the_run_file(ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    """Packed and transposed weights are those of one process."""
    pytest.importorskip("transformers")
    corpus(tmp_path)
    choice = {"model": GPT2, "optimizer": {"kind": "sgd", "lr": 0.1}, "layout": layout}
    verdict, *_ = ranks(2 * layout.get("shard", 1), verified, choice, str(tmp_path), True, 1)
    assert verdict["holds"], verdict["sentence"]


def test_layers_of_gpt2_are_found(ranks, tmp_path: Path) -> None:
    """In a module that can be traced, and its split holds."""
    pytest.importorskip("transformers")
    keys = proposed("ConvMLP", tmp_path).keys()
    assert keys["roles"] == {"up.weight": "column", "down.weight": "row"}
    own = tables("ConvMLP")
    choice = own | {"model": own["model"] | keys | {"parts": "declared"}, "layout": {"tensor": 2}}
    verdict, *_ = ranks(2, verified, choice, str(tmp_path), True, 1)
    assert verdict["holds"], verdict["sentence"]


def test_packed_layers_are_found_with_their_counts(tmp_path: Path) -> None:
    """Queries, keys and values in one matrix, and a gate beside what it gates; the width of a block is a count."""
    found = proposed("PackedCausal", tmp_path)
    first = {name: role for name, role in found.roles.roles.items() if name.startswith("blocks.0.")}
    assert first == {
        "blocks.0.attention.qkv.weight": "packed",
        "blocks.0.attention.out.weight": "row",
        "blocks.0.mlp.both.weight": "packed",
        "blocks.0.mlp.down.weight": "row",
    }
    assert list(found.roles.counts)[:2] == ["blocks.0.attention.width", "blocks.0.attention.heads"]


def test_what_cannot_be_split_is_said_by_name(tmp_path: Path) -> None:
    """The layer, and what its features go through."""
    whole = proposed("Packed", tmp_path).roles.whole
    assert "split()" in whole["qkv"]
    assert "returned" in whole["head"]


def test_linear_layers_of_other_classes_are_said_by_name(tmp_path: Path) -> None:
    """Falcon's are nn.Linear with a forward of their own: what is not split is said, and not left out."""
    pytest.importorskip("transformers")
    corpus(tmp_path)
    config = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"kind": "transformers", "architecture": "FalconForCausalLM", "config": config}
    whole = propose(run_file_of(tmp_path, model=model)).roles.whole
    assert "a FalconLinear, which may compute otherwise" in whole["transformer.h.1.mlp.dense_h_to_4h"]


def test_a_written_proposal_is_the_run_file_with_three_more_keys(tmp_path: Path) -> None:
    """Comments and other tables stay; a second proposal replaces the first."""
    path = tmp_path / "run.toml"
    text = '# mine\n[model]\nkind = "python"  # a module\nbuild = "m:f"\n\n[batch]\nglobal_samples = 8\n'
    path.write_text(text)
    found = proposed("Causal", tmp_path)
    for _ in range(2):
        write_keys(path, found)
        model = msgspec.convert(tomllib.loads(path.read_text())["model"], PythonModel)
        assert {"roles": model.roles, "counts": model.counts, "parts": "traced"} == found.keys()
    kept = [line for line in path.read_text().splitlines() if line.split(" =")[0] not in ("roles", "counts", "parts")]
    assert kept == text.splitlines()


def test_a_model_that_declares_its_split_needs_no_proposal(tmp_path: Path) -> None:
    """Shoal's own models do."""
    corpus(tmp_path)
    with pytest.raises(ConfigError, match='kind = "gpt" declares how it is split'):
        propose(run_file_of(tmp_path))


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    """A run file that was written for another module."""
    from shoal.parallel.traced.relay import declare

    with pytest.raises(UserCodeError, match=r"blocks\.7.*shoal split"):
        declare(build("Gated"), roles={"blocks.7.*": "column"}, counts=[], parts="declared")
    with pytest.raises(UserCodeError, match="no integer attribute"):
        declare(build("Gated"), roles={}, counts=["layers.0.heads"], parts="declared")


def test_layers_that_are_alike_are_said_in_one_pattern() -> None:
    """Unless one of them has another role or none, or the pattern fits a name that is not meant."""
    said = {f"h.{i}.{layer}.weight": "column" for i in (0, 1, 10) for layer in ("up", "gate")}
    names = [*said, "h.0.norm.weight", "head.weight"]
    assert patterns_of(said, names) == {"h.*.up.weight": "column", "h.*.gate.weight": "column"}
    odd = {name: "row" if name == "h.1.up.weight" else role for name, role in said.items()}
    ups = {name: role for name, role in odd.items() if ".up." in name}
    assert patterns_of(odd, names) == ups | {"h.*.gate.weight": "column"}
    assert patterns_of(said, [*names, "h.2.up.weight"]) == {
        **dict.fromkeys(ups, "column"),
        "h.*.gate.weight": "column",
    }
    assert patterns_of({"layers.0.weight": "column"}, ["layers.0.weight", "layers.1.weight"]) == {
        "layers.0.weight": "column"
    }


class Headed(nn.Module):
    """A block whose number of heads stands in itself, beside submodules that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.heads = nn.Linear(4, 4), 2


def test_a_pattern_of_counts_means_the_attributes_that_were_proposed() -> None:
    """Of blocks that have it themselves; a block that is not meant is in no pattern."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Headed() for _ in range(3))
    integers = [name for name in integer_attributes(model) if name.endswith(".heads")]
    assert integers == [f"blocks.{i}.heads" for i in range(3)]
    meant = dict.fromkeys(integers)
    assert list(patterns_of(meant, integer_attributes(model))) == ["blocks.*.heads"]
    declare(model, roles={}, counts=["blocks.*.heads"], parts="declared")
    assert model.tensor_counts() == tuple(integers)  # pyright: ignore[reportCallIssue]
    meant.pop("blocks.1.heads")
    assert list(patterns_of(meant, integer_attributes(model))) == list(meant)
