"""Values that skip stages: cuts are where there are none, and hold with recomputed blocks and sharded parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.planning.split_proposal import SplitProposal, propose
from tests.verification.layouts import corpus, run_file_of, verified
from tests.verification.relay_models import KINDS
from tests.verification.test_split_of_others import MODELS

SGD = {"optimizer": {"kind": "sgd", "lr": 0.1}, "pipeline": {"microbatches": 2}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline 2, recompute": {"layout": {"pipeline": 2}, "memory": {"recompute": "full"}},
    "pipeline 2, ZeRO-3": {"layout": {"pipeline": 2, "shard": 2}, "memory": {"zero": 3}},
    "pipeline 2, ZeRO-3, recompute": {
        "layout": {"pipeline": 2, "shard": 2}, "memory": {"zero": 3, "recompute": "full"},
    },
}  # fmt: skip
OTHERS = ("gpt2", "bert", "t5", "vit", "nano")
BLOCKS = [f"blocks.{i}" for i in range(4)]
ENDS = [["norm"], ["head"]]
EACH = [["embed"], *([block] for block in BLOCKS), *ENDS]
PARTS: dict[str, list[list[str]]] = {
    "Relayed": EACH,
    "Places": EACH,
    "TiedEnds": EACH,
    "LearnedPlaces": [["embed", "places", *BLOCKS], *ENDS],
    "FirstResidual": [["embed", *BLOCKS], *ENDS],
    "TrainingOnly": [["embed", *BLOCKS], *ENDS],
    "EncoderDecoder": [["embed"], ["blocks.0"], BLOCKS[1:], *ENDS],
    "SharedState": [["embed"], [*BLOCKS, "norm", "head"]],
}
"""A part begins only where the input of its first module is all that the rest needs."""


def tables(name: str) -> dict[str, Any]:
    if name in MODELS:
        return MODELS[name] | SGD
    return SGD | {
        "model": {"kind": "python", "build": "tests.verification.relay_models:build", "arguments": {"name": name}}
    }


def proposed(name: str, folder: Path) -> SplitProposal:
    if name in OTHERS and name != "nano":
        pytest.importorskip("transformers")
    corpus(folder)
    return propose(run_file_of(folder, **tables(name)))


@pytest.mark.parametrize("name", KINDS)
def test_a_cut_is_where_one_value_goes_on(tmp_path: Path, name: str) -> None:
    """In training too, and where a value goes on by what the modules keep."""
    found = proposed(name, tmp_path)
    assert found.said == PARTS[name]
    assert not found.uncut


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_a_relayed_model_is_the_same(ranks, tmp_path: Path, name: str, layout: str) -> None:
    """Loss, every gradient and the weights in float64, with dropout in and between the blocks."""
    own, choice = tables(name), LAYOUTS[layout]
    model = own["model"] | proposed(name, tmp_path).keys()
    world = choice["layout"]["pipeline"] * choice["layout"].get("shard", 1)
    verdict, *_ = ranks(world, verified, own | choice | {"model": model}, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.parametrize("layout", [{"pipeline": 4}, {"pipeline": 2, "replicate": 2}], ids=str)
def test_draws_between_blocks_are_those_of_one_process(ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    """Dropout as a function of the model itself, which every stage goes through, and several parts on a stage."""
    own = tables("Places")
    choice = own | {"model": own["model"] | {"parts": PARTS["Places"]}, "layout": layout}
    corpus(tmp_path)
    verdict, *_ = ranks(4, verified, choice, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FirstResidual", "LearnedPlaces", "TrainingOnly"])
def test_parts_by_hand_that_forget_a_value_are_refused(ranks, tmp_path: Path, name: str) -> None:
    """In the first step, with the part and what to do; not as a loss that is not finite."""
    own, parts = tables(name), [["embed", *(["places"] if name == "LearnedPlaces" else []), *BLOCKS[:2]], BLOCKS[2:]]
    parts[-1] = [*parts[-1], "norm", "head"]
    corpus(tmp_path)
    choice = own | {"model": own["model"] | {"parts": parts}, "layout": {"pipeline": 2}}
    outcomes = ranks.outcomes(2, verified, choice, str(tmp_path), True, 1)
    said = [str(found) for worked, found in outcomes if not worked]
    assert any(f"{name} that begins with blocks.2 gave NaN in its first forward" in sentence for sentence in said), said
    assert any("find the parts anew by `shoal split`" in sentence for sentence in said)
