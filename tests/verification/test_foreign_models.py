"""Models that declare nothing to Shoal are the same in every layout that they allow, or are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.assembly.proofs import missing_proof
from shoal.assembly.splitting import blocks_in
from shoal.errors import UserCodeError
from tests.verification.foreign_models import PICTURES, TIMES, ConvNorm, Dropping, Nested, foreign
from tests.verification.layouts import GPT, corpus, run_file_of, verified

SHARD, REPLICATE = {"layout": {"shard": 2}}, {"layout": {"replicate": 2}}
GROUPED = {"model": foreign("conv_norm", {"batch_norm": "grouped", "group_samples": 2}), "data": PICTURES}
FROZEN = {"model": foreign("conv_norm", frozen=True), "data": PICTURES}
MICRO: dict[str, Any] = {"batch": {"micro_samples": 3}}
FULL = {"memory": {"recompute": "full"}}


def _refusal(ranks, folder: Path, tables: dict[str, Any]) -> str:
    corpus(folder)
    outcomes = ranks.outcomes(2, verified, tables, str(folder), False, 1)
    assert not any(worked for worked, _ in outcomes)
    return " ".join(str(value) for _, value in outcomes)


def test_zero_3_gathers_nested_blocks_one_by_one() -> None:
    """`transformer.h` and chains of blocks are units, however deep they lie."""
    nested, conv = Nested(), ConvNorm()
    assert blocks_in(nested, None, 0) == list(nested.transformer.h)
    assert blocks_in(conv, None, 0) == list(conv.layer1)
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])])
    assert blocks_in(nn.Sequential(lists), None, 0) == list(lists[0].children())


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("nested", True, "ZeRO-3 gathers 2 blocks (transformer.h.0 to transformer.h.1) one after the other; the other"),
        ("spectral", False, "ZeRO-3 found no blocks in Spectral, so all of its parameters are gathered at once"),
    ],
)
def test_a_start_says_what_zero_3_gathers_at_a_time(ranks, tmp_path: Path, name: str, found: bool, words: str) -> None:
    """With the names of the blocks, or that there are none; nothing under other stages."""
    for said in ranks(2, gathering, {"model": foreign(name), **SHARD}, str(tmp_path)):
        assert said[0] is found
        assert said[1].startswith(words)
    assert ranks(2, gathering, {"model": foreign(name), **SHARD, "memory": {"zero": 2}}, str(tmp_path)) == [None, None]


def gathering(place, tables: dict[str, Any], folder: str) -> tuple[bool, str] | None:
    from shoal.assembly.run_gradients import gathering_of

    run = _opened(place, tables, folder)
    return gathering_of(run.run_file.memory, run.generation.parts, run.mesh)


BF16 = {"kind": "bfloat16_params"}
MASTERS = {"precision": BF16}
SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "nested zero 3": (2, {"model": foreign("nested"), **SHARD}),
    "nested recomputed": (2, {"model": foreign("nested"), **SHARD, **FULL}),
    "frozen norms": (2, {**FROZEN, **REPLICATE}),
    "frozen norms, microbatches": (1, {**FROZEN, "batch": {"micro_samples": 3}}),
    "grouped norms": (2, {**GROUPED, **REPLICATE}),
    "grouped norms, zero 3": (2, {**GROUPED, **SHARD}),
    "grouped norms, microbatches": (1, {**GROUPED, "batch": {"micro_samples": 4}}),
    "cached, recomputed": (1, {"model": foreign("cached"), **FULL, "layout": {"replicate": 1}}),
    "spectral norm, microbatches": (1, {"model": foreign("spectral"), **MICRO}),
    "spectral norm": (2, {"model": foreign("spectral"), **REPLICATE, **MICRO}),
    "a teacher that follows, microbatches": (1, {"model": foreign("distilled"), **MICRO}),
    "a teacher that follows": (2, {"model": foreign("distilled"), **SHARD, **MICRO}),
    "dropout, microbatches": (1, {"model": foreign("nested", dropout=0.1), **MICRO}),
    "dropout": (2, {"model": foreign("nested", dropout=0.1), **SHARD, **MICRO}),
    "dropout, recomputed": (2, {"model": foreign("nested", dropout=0.1), **REPLICATE, **FULL, **MICRO}),
    "dropout, checkpointed": (2, {"model": foreign("nested", dropout=0.1, checkpointed=True), **REPLICATE, **MICRO}),
    "recurrent dropout": (2, {"model": foreign("recurrent"), **REPLICATE, **MICRO}),
    "noise": (2, {"model": foreign("noisy"), **REPLICATE, **MICRO}),
    "dropout, tensor": (2, {"model": foreign("dropping"), "layout": {"tensor": 2}, **MICRO}),
    "dropout, sequence": (2, {"model": foreign("dropping"), "layout": {"tensor": 2, "sequence_parallel": True}}),
    "dropout, pipeline": (2, {"model": foreign("dropping"), "layout": {"pipeline": 2}}),
    "dropout, pipeline, recomputed": (2, {"model": foreign("dropping"), "layout": {"pipeline": 2}, **FULL}),
    "bfloat16": (2, {"model": foreign("nested", dropout=0.1), "precision": {"kind": "bfloat16"}, **REPLICATE}),
    "float16": (2, {"model": foreign("nested"), "precision": {"kind": "float16"}, **SHARD}),
    "masters": (2, {**MASTERS, **REPLICATE, "model": foreign("nested", dropout=0.1)}),
    "masters, zero 1": (2, {**MASTERS, "layout": {"shard": 2}, "memory": {"zero": 1}}),
    "masters, zero 3, sums in bfloat16": (2, {"precision": BF16 | {"reduce_dtype": "bfloat16"}, **SHARD, **MICRO}),
    "masters, tensor": (2, {**MASTERS, "layout": {"tensor": 2}, "model": GPT | {"tied": True}}),
    "masters, pipeline": (2, {**MASTERS, "layout": {"pipeline": 2}, "model": GPT | {"tied": True}}),
    "masters, grouped norms": (2, {**MASTERS, **GROUPED, **REPLICATE}),
    "one block, two stages": (4, {"model": GPT | {"layers": 1}, "layout": {"pipeline": 2, "context": 2}}),
}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("case", SAME)
def test_a_foreign_model_is_the_same_model(ranks, tmp_path: Path, case: str) -> None:
    """`verify` holds, and nothing about the model had to change."""
    size, tables = SAME[case]
    corpus(tmp_path)
    verdict, *_ = ranks(size, verified, tables, str(tmp_path), False, 3)
    assert verdict["holds"], verdict["sentence"]


def test_draws_that_nothing_keys_are_named_by_verify_and_in_training(ranks, tmp_path: Path) -> None:
    """The layout draws otherwise, which no comparison can tell from a mistake: so the verdict says whose draws it saw,
    and training says it once.
    """
    corpus(tmp_path)
    tables = {"model": foreign("sampling"), **REPLICATE}
    verdict, *_ = ranks(2, verified, tables, str(tmp_path), False, 1)
    assert not verdict["holds"]
    assert "This need not be a mistake: the model calls poisson" in verdict["sentence"]
    assert "--exact" not in verdict["sentence"]
    assert any("poisson" in note for note in verdict["notes"])
    for said in ranks(2, news_of_two_steps, tables, str(tmp_path)):
        assert "the model calls poisson" in said[0]
        assert said[1] == ""


def news_of_two_steps(place, tables: dict[str, Any], folder: str) -> list[str]:
    from shoal.assembly.proofs import UnkeyedDraws
    from shoal.data.cursor import Cursor

    run, said = _opened(place, tables, folder), []
    unkeyed = UnkeyedDraws(run)
    with run.feed(Cursor()) as feed:
        for number in (1, 2):
            run.step(number, feed.next().microbatches, lr=0.1)
            said.append("".join(unkeyed.news()))
    return said


def test_a_blocks_weight_read_outside_of_it_is_refused_under_zero_3(ranks, tmp_path: Path) -> None:
    """The block is called, too, so that its gradient alone does not show it: the read itself is refused."""
    said = _refusal(ranks, tmp_path, {"model": foreign("nested", direct=True), **SHARD})
    assert "transformer.h.0.out.weight was read outside of transformer.h.0 (a Block)" in said
    assert "memory.zero = 2" in said


def test_a_read_outside_that_comes_later_is_refused_when_it_comes(ranks, tmp_path: Path) -> None:
    """The second step is the first that reads it, and it trains nothing."""
    for said in ranks(2, read_later, {"model": foreign("nested", direct=True), **SHARD}, str(tmp_path)):
        assert said[0] is True
        assert "transformer.h.0.out.weight was read outside of transformer.h.0 (a Block)" in said[1]


def read_later(place, tables: dict[str, Any], folder: str) -> list[Any]:
    """Of each step whether it counted, at last why not."""
    from shoal.data.cursor import Cursor

    run, said = _opened(place, tables, folder), []
    model: Any = run.model
    with run.feed(Cursor()) as feed:
        for number in (1, 2, 3):
            model.direct = number > 1
            try:
                said.append(run.step(number, feed.next().microbatches, lr=0.1).committed)
            except UserCodeError as refusal:
                said.append(str(refusal))
    return said


def test_a_batch_norm_that_ranks_would_cut_is_refused_with_the_ways_out(ranks, tmp_path: Path) -> None:
    said = _refusal(ranks, tmp_path, {"model": foreign("conv_norm"), "data": PICTURES, **REPLICATE})
    assert 'model.batch_norm = "synchronised"' in said
    assert 'model.batch_norm = "grouped"' in said
    assert "eval()" in said


def test_a_complex_parameter_is_refused_by_name(ranks, tmp_path: Path) -> None:
    said = _refusal(ranks, tmp_path, {"model": foreign("rotated"), **REPLICATE})
    assert "the parameter turn is complex" in said
    assert "torch.view_as_complex" in said


def test_float64_inputs_reach_the_model_as_they_are(ranks, tmp_path: Path) -> None:
    """Their fractions would be gone in float32: the loss of the layout and of the reference sees them."""
    tables = {
        "model": foreign("doubled"), "data": TIMES, "loss": {"kind": "squared_error"}, **REPLICATE
    }  # fmt: skip
    verdict, *_ = ranks(2, seen_dtypes, tables, str(tmp_path))
    assert verdict == ["torch.float64"]


def seen_dtypes(place, tables: dict[str, Any], folder: str) -> list[str]:
    """The types of what the model was called with in one step."""
    from shoal.data.cursor import Cursor

    run = _opened(place, tables, folder)
    with run.feed(Cursor()) as feed:
        run.step(1, feed.next().microbatches, lr=0.1)
    seen = run.model.seen
    assert isinstance(seen, list)
    return sorted({str(dtype) for dtype in seen})


def _opened(place, tables: dict[str, Any], folder: str) -> Any:
    from shoal.assembly.run import open_run
    from shoal.launcher.environment import Place
    from tests.verification.layouts import run_file_of

    corpus(Path(folder))
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    return open_run(run_file_of(Path(folder), **tables), here, store=place.store)


def test_a_released_parameter_answers_for_its_shape_and_for_nothing_else() -> None:
    """Shapes and types may be asked for anywhere; every operator that reads numbers raises the sentence."""
    from shoal.gradients.units import ReleasedParameter, released

    parameter = nn.Parameter(torch.zeros(2))
    parameter.__class__ = released(nn.Parameter)
    assert isinstance(parameter, ReleasedParameter)
    parameter.read = "the parameter p was read"
    assert parameter.shape == (2,)
    assert parameter.numel() == 2
    assert parameter.dtype is torch.float32
    reads = [
        lambda: parameter.sum(), lambda: torch.stack([parameter]), lambda: parameter.data, lambda: parameter.detach(),
        lambda: copy.deepcopy(parameter), lambda: nn.functional.linear(torch.ones(2), parameter[None]),
        lambda: parameter.__setattr__("data", torch.ones(2)), lambda: nn.utils.parameters_to_vector([parameter]),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(UserCodeError, match="the parameter p was read"):
            read()
    parameter.__class__ = nn.Parameter
    assert parameter.sum() == 0


def test_a_tensor_split_without_a_proof_is_said_until_verify_has_passed(ranks, tmp_path: Path) -> None:
    """A wrong role trains without an error, so a start offers `verify`; after it has passed, nothing is said."""
    tables = {"model": foreign("dropping"), "layout": {"tensor": 2}}
    corpus(tmp_path)
    run_file = run_file_of(tmp_path, **tables)
    shapes = {name: tuple(parameter.shape) for name, parameter in Dropping().named_parameters()}
    assert "`shoal verify`" in (missing_proof(run_file, shapes) or "")
    ranks(2, verified, tables, str(tmp_path), False, 1)
    assert missing_proof(run_file, shapes) is None
    assert missing_proof(run_file, shapes | {"head.weight": (3, 3)}) is not None
