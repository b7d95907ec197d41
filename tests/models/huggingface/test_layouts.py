"""Models of transformers are the same in every layout that they declare a plan for, and refused by name in others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.models.huggingface.architectures import APERTUS, DEEPSEEK_V2, FURTHER, LLAMA, PHI3, RESNET, data
from tests.models.huggingface.cells import (
    FURTHER_LAYOUTS,
    LAYOUTS,
    MODELS,
    expected,
    further_refusal,
    tables_of,
    world_of,
)
from tests.verification.layouts import corpus, verified

pytest.importorskip("transformers")
pytest.importorskip("peft")

CELLS = [(model, layout) for model in MODELS for layout in LAYOUTS]
FAST = {
    ("Llama", "replicate 2"), ("Llama", "tensor 2, sequence"), ("Qwen3", "tensor 2, pipeline 2"),
    ("Qwen3", "context 2"), ("tied Llama", "pipeline 2, interleaved"), ("Mixtral", "tensor 2"), ("GPT-2", "context 2"),
    ("GPT-2", "tensor 2"), ("GPT-2", "pipeline 2"), ("BERT", "ZeRO-3"), ("BERT", "context 2"), ("ViT", "ZeRO-2"),
    ("T5", "ZeRO-3, recompute"), ("Whisper", "ZeRO-3"), ("LoRA", "tensor 2"), ("LoRA", "ZeRO-3"),
    ("LoRA", "tensor 2, sequence"), ("Mixtral", "expert 2, ZeRO-1"), ("Mixtral", "expert 4, tensor 2"),
    ("Qwen2-MoE", "expert 2, tensor 2, sequence"), ("Qwen3-MoE", "expert 2 of shard 4"), ("Llama", "expert 2, ZeRO-1"),
}  # fmt: skip


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*cell, id=" ".join(cell), marks=() if cell in FAST else pytest.mark.stress)
        for cell in CELLS
    ],
)  # fmt: skip
def test_an_architecture_is_the_same_model_or_refused(ranks, tmp_path: Path, model: str, layout: str) -> None:
    """`verify` compares loss, norm, every gradient and the weights after two steps with one process."""
    corpus(tmp_path)
    wanted = expected(model, layout)
    outcomes = ranks.outcomes(world_of(layout), verified, tables_of(model, layout), str(tmp_path), False, 2)
    said = [str(value) for worked, value in outcomes if not worked]
    if wanted != "same":
        assert len(said) == len(outcomes)
        assert all(wanted in sentence for sentence in said), said[0]
        return
    assert not said, said[0]
    verdict = outcomes[0][1]
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.parametrize("norm", [{"batch_norm": "grouped", "group_samples": 4}, {"batch_norm": "synchronised"}, {}])
def test_batch_norms_are_the_same_or_refused(ranks, tmp_path: Path, norm: dict[str, Any]) -> None:
    """By the keys that the refusal names; in float64, with the running statistics."""
    tables = {"model": RESNET | norm, "data": data("pictures"), "layout": {"replicate": 2}}
    (worked, found), *_ = ranks.outcomes(2, verified, tables, str(tmp_path), True, 2)
    if not norm:
        assert not worked
        assert 'set model.batch_norm = "synchronised"' in found
        return
    assert worked, found
    assert found["holds"], found["sentence"]


SLICES = {"layout": {"tensor": 2, "sequence_parallel": True}}


@pytest.mark.parametrize("inputs", ["named_tokens", "padded_tokens"])
def test_a_slice_of_named_inputs_is_the_same_without_a_mask(ranks, tmp_path: Path, inputs: str) -> None:
    """Positions are those of the whole sequence; a mask is refused by name."""
    tables = {"model": LLAMA, "data": data(inputs), **SLICES}
    (worked, found), *_ = ranks.outcomes(2, verified, tables, str(tmp_path), False, 1)
    assert worked == (inputs == "named_tokens"), found
    if worked:
        assert found["holds"], found["sentence"]
    else:
        assert "hold attention_mask, and layout.sequence_parallel = true cuts sequences" in found


@pytest.mark.slow
def test_slices_go_through_the_stages_of_a_pipeline(ranks, tmp_path: Path) -> None:
    """Also those that hold no embedding."""
    corpus(tmp_path)
    tables = {"model": LLAMA, "layout": SLICES["layout"] | {"pipeline": 2}}
    verdict, *_ = ranks(4, verified, tables, str(tmp_path), False, 2)
    assert verdict["holds"], verdict["sentence"]


UNFOLLOWED = {
    "Apertus": (APERTUS, r"has model\.layers\.0\.mlp\.act_fn\.alpha_p between layers that its tensor plan splits"),
    "Phi-3": (PHI3, "gathers what each of its layers gives"),
    "DeepSeek-V2": (DEEPSEEK_V2, "by 'mla_kv_a_proj', which Shoal does not know"),
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_a_plan_that_cannot_be_followed_is_refused_under_tensor_alone(ranks, tmp_path: Path, name: str) -> None:
    """ZeRO-3 asks nothing of it; in float32, as their norms are."""
    model, said = UNFOLLOWED[name]
    corpus(tmp_path)
    zero, *_ = ranks(2, verified, {"model": model, "layout": {"shard": 2}}, str(tmp_path), False, 2)
    assert zero["holds"], zero["sentence"]
    outcomes = ranks.outcomes(2, verified, {"model": model, "layout": {"tensor": 2}}, str(tmp_path), True, 2)
    assert all(not worked and re.search(said, found) for worked, found in outcomes)
    assert all("layout.tensor = 1" in found for _, found in outcomes)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", FURTHER_LAYOUTS)
@pytest.mark.parametrize("model", FURTHER)
def test_a_further_decoder_is_the_same_model_or_refused(ranks, tmp_path: Path, model: str, layout: str) -> None:
    """Each with something of its own: what is fused, tied, scaled, capped, left out of the plan, or not attention."""
    corpus(tmp_path)
    tables = {"model": FURTHER[model], **LAYOUTS[layout]}
    outcomes = ranks.outcomes(world_of(layout), verified, tables, str(tmp_path), False, 2)
    said = [str(value) for worked, value in outcomes if not worked]
    wanted = further_refusal(model, layout)
    assert bool(said) == bool(wanted), said[:1]
    if wanted:
        assert all(wanted in sentence for sentence in said), said[0]
        return
    assert outcomes[0][1]["holds"], outcomes[0][1]["sentence"]


PAGE = Path(__file__).parents[3] / "docs/huggingface.md"
ZEROS = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, recompute", "ZeRO-2, replicate 2")
EXPERTS = [(layout,) for layout in LAYOUTS if layout.startswith("expert")]
DOCUMENTED: dict[str, tuple[Collection[str], list[tuple[str, ...]]]] = {
    "| | replicate |": (
        MODELS,
        [("replicate 2",), ZEROS, ("tensor 2",), ("tensor 2, sequence",), ("pipeline 2",), ("pipeline 2, interleaved",),
         ("context 2",), ("tensor 2, pipeline 2",)],
    ),
    "| with `layout.expert` |": (MODELS, EXPERTS),
    "| | ZeRO-3 |": (FURTHER, [(layout,) for layout in FURTHER_LAYOUTS]),
}  # fmt: skip
"""Tables of the page by the beginning of their first line: the models of their rows, the layouts of their columns."""
NAMED = {"Llama with LoRA": "LoRA", "ERNIE 4.5 MoE": "ERNIE"}


def documented(header: str, models: Collection[str], columns: list[tuple[str, ...]]) -> dict[tuple[str, str], bool]:
    """Whether the page says "same", by model and layout."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    said: dict[tuple[str, str], bool] = {}
    for row in rows:
        names, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        others = [model for model in models if (model, columns[0][0]) not in said]
        listed = [NAMED.get(name, name) for name in re.sub(r" \([^)]*\)", "", names).split(", ")]
        for model in others if names == "all others" else listed:
            for layouts, cell in zip(columns, cells, strict=True):
                said |= {(model, layout): cell.startswith("same") for layout in layouts}
    return said


@pytest.mark.parametrize("header", DOCUMENTED, ids=["layouts", "experts", "further decoders"])
def test_the_page_says_of_each_cell_what_the_tests_hold(header: str) -> None:
    models, columns = DOCUMENTED[header]
    holds = further_refusal if models is FURTHER else expected
    layouts = [layout for column in columns for layout in column]
    wanted = {(model, layout): holds(model, layout) in ("", "same") for model in models for layout in layouts}
    assert documented(header, models, columns) == wanted


def test_the_tables_have_as_many_cells_as_the_page_says() -> None:
    said = re.search(r"more than (\d+) cells", PAGE.read_text())
    assert said is not None
    assert len(CELLS) + len(FURTHER) * len(FURTHER_LAYOUTS) > int(said[1])
    assert {model for model, _ in FAST} == set(MODELS)
