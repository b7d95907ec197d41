"""Hidden features, heads and experts that are taken out of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.assembly.objects import UserObjects, model_of
from shoal.assembly.shrinking import sentence, shrink
from shoal.checkpoint.weights import save_weights, weights_of
from shoal.cli.checkpoint import export
from shoal.config.load import dumps, read
from shoal.errors import ConfigError, UsageError
from shoal.sparsity.units import UnitGroup, expert_groups, kept_units, shrunk, unit_groups, unit_mask, unit_scores
from tests.assembly.training_ranks import trained as taken
from tests.models.huggingface.architectures import FURTHER, GPT2, MIXTRAL, NEOX
from tests.sparsity.test_foreign_models import LLAMA
from tests.sparsity.test_training import BASE, SMALL
from tests.verification.layouts import corpus, run_file_of

SHAPES = {"0.ff.gate.weight": (6, 4), "0.ff.up.weight": (6, 4), "0.ff.down.weight": (4, 6)}
ROLES = {"0.ff.gate.weight": "column", "0.ff.up.weight": "column", "0.ff.down.weight": "row"}


def test_a_feature_is_a_row_where_it_is_made_and_a_column_where_it_is_read() -> None:
    (group,) = unit_groups(SHAPES, ROLES, pattern="features")
    assert group == UnitGroup({"0.ff.gate.weight": 0, "0.ff.up.weight": 0, "0.ff.down.weight": 1}, 6)
    scores = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    gate, up, down = scores.values()
    wanted = [torch.cat([gate[i], up[i], down[:, i]]).mean() for i in range(6)]
    assert torch.allclose(unit_scores(group, scores), torch.stack(wanted))
    kept = torch.tensor([True, False, True, True, False, True])
    assert torch.equal(unit_mask(kept, 1, (4, 6)).all(0), kept)
    assert torch.equal(unit_mask(kept, 0, (6, 4)).all(1), kept)


@pytest.mark.parametrize(
    ("shapes", "roles"),
    [
        ({"a.up.weight": (6, 4)}, {"a.up.weight": "column"}),
        ({"a.up.weight": (6, 4), "a.down.weight": (4, 5)}, {"a.up.weight": "column", "a.down.weight": "row"}),
        ({"a.up.weight": (6, 4)}, {"a.up.weight": "replicated"}),
    ],
)
def test_layers_that_share_no_features_are_refused(shapes: dict[str, tuple[int, ...]], roles: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="make and read the same features"):
        unit_groups(shapes, roles, pattern="features")


def test_blocks_that_would_differ_are_not_shrunk() -> None:
    shapes = SHAPES | {name.replace("0.", "1.", 1): shape for name, shape in SHAPES.items()}
    roles = ROLES | {name.replace("0.", "1.", 1): role for name, role in ROLES.items()}
    groups = unit_groups(shapes, roles, pattern="features")
    masks = {
        name: unit_mask(torch.arange(6) < 2 + int(name[0]), 1 if "down" in name else 0, shape)
        for name, shape in shapes.items()
    }
    kept = [kept_units(group, masks) for group in groups]
    with pytest.raises(UsageError, match="from 2 to 3 of them"):
        shrunk({name: torch.rand(shape) for name, shape in shapes.items()}, groups, kept)


def test_a_head_is_a_run_of_rows_and_of_columns() -> None:
    """A key head goes with the two query heads that share it."""
    shapes = {"0.query.weight": (12, 8), "0.key.weight": (6, 8), "0.output.weight": (8, 12)}
    roles = dict(zip(shapes, ("column", "column", "row"), strict=True))
    (group,) = unit_groups(shapes, roles, pattern="heads", heads=2)
    scores = {name: torch.rand(shape) for name, shape in shapes.items()}
    query, key, output = scores.values()
    wanted = torch.cat([query[6:].flatten(), key[3:].flatten(), output[:, 6:].flatten()]).mean()
    assert torch.allclose(unit_scores(group, scores)[1], wanted)
    mask = unit_mask(torch.tensor([False, True]), 1, (8, 12))
    assert torch.equal(mask, torch.cat([torch.zeros(8, 6), torch.ones(8, 6)], dim=1).bool())
    weights = scores | {"0.query.bias": torch.arange(12.0), "0.output.bias": torch.arange(8.0)}
    smaller, left = shrunk(weights, [group], [torch.tensor([False, True])])
    assert left == 1
    assert torch.equal(smaller["0.output.weight"], output[:, 6:])
    assert smaller["0.query.bias"].tolist() == list(range(6, 12))
    assert smaller["0.output.bias"].tolist() == list(range(8))


MIXTURE = SMALL | {"kind": "moe", "experts": 4, "top_k": 2, "expert_width": 12}
REMOVED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "features": (SMALL, {"pattern": "features", "density": 0.5}, {"feed_forward_width": 12}),
    "heads": (
        SMALL | {"heads": 4, "kv_heads": 2, "head_size": 6},
        {"pattern": "heads", "density": 0.5},
        {"heads": 2, "kv_heads": 1, "head_size": 6},
    ),
    "features of Llama": (LLAMA, {"pattern": "features", "density": 0.5}, {"config": {"intermediate_size": 24}}),
    "heads of Llama": (
        LLAMA,
        {"pattern": "heads", "density": 0.5},
        {"config": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}},
    ),
    "heads of Qwen2, with biases": (
        LLAMA | {"architecture": "Qwen2ForCausalLM"},
        {"pattern": "heads", "density": 0.5},
        {"config": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}},
    ),
}


@pytest.mark.parametrize("case", REMOVED)
def test_a_smaller_model_computes_what_the_masked_one_does(ranks, tmp_path: Path, case: str) -> None:
    """What was masked goes; what is written begins a run of the smaller model."""
    model, sparsity, changed = REMOVED[case]
    corpus(tmp_path)
    tables = (
        BASE
        | {"model": model}
        | {"sparsity": {"kind": "magnitude", **sparsity, "schedule": {"begin": 2, "end": 4, "every": 1}}}
    )
    ranks(1, taken, tables, str(tmp_path))
    write_run_file(tmp_path, tables)
    found = shrink(tmp_path / "run", tmp_path / "smaller")
    assert found.changed == changed
    assert f"{found.left} {'key ' if found.what == 'heads' else ''}{found.what}" in sentence(found, tmp_path)
    written = read(tmp_path / "smaller" / "model.toml")["model"]
    large, small = weights_of(tmp_path / "run"), weights_of(tmp_path / "smaller")
    assert sum(t.numel() for t in small.values()) < sum(t.numel() for t in large.values())
    assert torch.allclose(logits(tmp_path, model, large), logits(tmp_path, written, small), rtol=1e-12)
    if model["kind"] == "transformers":
        export(tmp_path / "smaller", tmp_path / "exported", to="huggingface")
        theirs = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(
            tmp_path / "exported", dtype=torch.float64
        )
        assert torch.allclose(logits(tmp_path, written, theirs.state_dict()), logits(tmp_path, written, small))
    with pytest.raises(UsageError, match="give a new folder"):
        shrink(tmp_path / "run", tmp_path / "smaller")


def logits(folder: Path, model: dict[str, Any], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of nine tokens, by the table `[model]` in float64."""
    run_file = run_file_of(folder, **(BASE | {"model": model}))
    built = model_of(run_file, UserObjects(), device=torch.device("cpu"), dtype=torch.float64)
    built.load_state_dict(weights, strict=False)
    output = built.eval()(torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0)))
    return output if isinstance(output, torch.Tensor) else output.logits


def test_experts_are_taken_out_with_their_part_of_the_router(ranks, tmp_path: Path) -> None:
    """Those of the smallest weights; the others are what they were."""
    corpus(tmp_path)
    tables = BASE | {"model": MIXTURE}
    ranks(1, taken, tables, str(tmp_path))
    write_run_file(tmp_path, tables)
    found = shrink(tmp_path / "run", tmp_path / "smaller", "experts:0.5")
    assert found.changed == {"experts": 2}
    large, small = weights_of(tmp_path / "run"), weights_of(tmp_path / "smaller")
    name = "blocks.0.feed_forward"
    groups = expert_groups({n: tuple(t.shape) for n, t in large.items()})
    assert set(groups[0].dims) == {n for n in large if n.startswith(name) and large[n].shape[:1] == (4,)}
    sizes = [torch.cat([large[n][e].abs().flatten() for n in groups[0].dims]).mean() for e in range(4)]
    kept = sorted(sorted(range(4), key=lambda e: -sizes[e])[:2])
    assert torch.equal(small[f"{name}.experts.down"], large[f"{name}.experts.down"][kept])
    assert torch.equal(small[f"{name}.router.weight"], large[f"{name}.router.weight"][kept])
    assert logits(tmp_path, read(tmp_path / "smaller" / "model.toml")["model"], small).isfinite().all()
    with pytest.raises(UsageError, match="the smaller model cannot be"):
        shrink(tmp_path / "run", tmp_path / "too-small", "experts:0.2")


NOT_STACKED = {
    "a module each": {"0.experts.0.up": (8, 4), "0.experts.0.down": (4, 8), "0.experts.1.up": (8, 4)},
    "other numbers": {"0.experts.up": (4, 8, 6), "0.experts.down": (3, 6, 8)},
    "not along the first": {"0.experts.up": (4, 8, 6), "0.experts.bias": (8, 4)},
    "nothing of three dimensions": {"0.experts.up": (16, 6)},
}


@pytest.mark.parametrize("what", NOT_STACKED)
def test_experts_that_are_not_stacked_are_refused(what: str) -> None:
    """One expert's rows would be taken for experts."""
    with pytest.raises(UsageError, match="does not hold one expert a row of its first dimension"):
        expert_groups(NOT_STACKED[what] | {"0.router.weight": (4, 6)})


def test_stacked_experts_may_have_biases() -> None:
    shapes = {"0.experts.up": (4, 8, 6), "0.experts.up_bias": (4, 8), "0.router.weight": (4, 6), "0.router.scale": (6,)}
    (group,) = expert_groups(shapes)
    assert (set(group.dims), group.size) == (set(shapes) - {"0.router.scale"}, 4)


@pytest.mark.parametrize(("share", "left"), [("0.5", 2), ("0.2", 0)])
def test_a_token_has_as_many_experts_as_it_had(ranks, tmp_path: Path, share: str, left: int) -> None:
    """A class of transformers that would choose more than there are is refused."""
    corpus(tmp_path)
    tables = BASE | {"model": MIXTRAL}
    ranks(1, taken, tables, str(tmp_path))
    write_run_file(tmp_path, tables)
    if left:
        found = shrink(tmp_path / "run", tmp_path / "smaller", f"experts:{share}")
        assert found.changed == {"config": {"num_local_experts": left}}
        return
    with pytest.raises(UsageError, match="num_experts_per_tok = 2"):
        shrink(tmp_path / "run", tmp_path / "smaller", f"experts:{share}")
    assert not (tmp_path / "smaller" / "model.toml").exists()


NOT_TO = {"heads": "the share that stays", "layers:0.5": "give features, heads or experts", "heads:0.0": "the share",
          "experts:0.5": "this model has no experts"}  # fmt: skip


@pytest.mark.parametrize("to", NOT_TO)
def test_what_cannot_be_taken_out_is_refused(ranks, dense: Path, to: str) -> None:
    with pytest.raises(UsageError, match=NOT_TO[to]):
        shrink(dense / "run", dense / "smaller", to)


@pytest.fixture(scope="module")
def dense(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    corpus(folder)
    ranks(1, taken, BASE, str(folder))
    write_run_file(folder, BASE)
    return folder


def test_the_smallest_heads_of_a_dense_model_are_taken_out(dense: Path) -> None:
    found = shrink(dense / "run", dense / "fewer", "heads:0.5")
    assert found.changed == {"heads": 1, "kv_heads": 1, "head_size": 8}
    small = weights_of(dense / "fewer")
    assert small["blocks.0.attention.query.weight"].shape == (8, 16)
    assert small["blocks.0.attention.output.weight"].shape == (16, 8)
    with pytest.raises(UsageError, match="has masked nothing that can be taken out"):
        shrink(dense / "run", dense / "other")


def write_run_file(folder: Path, tables: dict[str, Any]) -> None:
    (folder / "run" / "run.toml").write_text(dumps(run_file_of(folder, **tables)))


KEPT = {
    "heads of GPT-NeoX": (
        NEOX,
        "heads:0.5",
        r"query_key_value.weight would be \[48, 32\], and a model of fewer",
    ),
    "features of GPT-2": (GPT2, "features:0.5", "no features that are declared as columns and rows"),
    "heads of OLMo2": (FURTHER["OLMo2"], "heads:0.5", "no heads that are declared as columns and rows"),
}
"""Fewer heads would be larger ones; no plan says what is made and read; a norm is over all heads."""


@pytest.mark.parametrize("case", KEPT)
def test_what_a_class_has_no_smaller_form_of_is_refused(tmp_path: Path, case: str) -> None:
    model, to, sentence = KEPT[case]
    run_file = run_file_of(tmp_path, **(BASE | {"model": model}))
    built = model_of(run_file, UserObjects(), device=torch.device("cpu"), dtype=torch.float64)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(dumps(run_file))
    save_weights({n: p.detach() for n, p in built.named_parameters()}, tmp_path / "given", tmp_path / "run")
    with pytest.raises(UsageError, match=sentence):
        shrink(tmp_path / "run", tmp_path / "smaller", to)
    assert not (tmp_path / "smaller").exists()
