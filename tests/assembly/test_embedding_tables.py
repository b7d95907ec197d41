"""Embedding tables over ranks: the gradients of one process, and bytes in proportion to the rows touched."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shoal
from shoal.assembly.run import open_run
from shoal.errors import UserCodeError
from shoal.launcher.environment import Place
from tests.assembly.journey import travel
from tests.ranks import TestPlace
from tests.verification.layouts import run_file_of, verified

HERE = "tests.verification.table_models"
SAMPLES = 10


def tables(split: str = "rows", *, rows: int = 1000, **others: Any) -> dict[str, Any]:
    model = {"kind": "python", "build": f"{HERE}:recommender", "arguments": {"split": split, "rows": rows}}
    base: dict[str, Any] = {
        "model": model,
        "data": {"kind": "python", "build": f"{HERE}:clicks", "arguments": {"rows": rows}},
        "loss": {"kind": "python", "build": f"{HERE}:click_loss"},
        "batch": {"global_samples": SAMPLES, "denominator": "samples"},
        "optimizer": {"kind": "adagrad", "lr": 0.1, "clip_norm": 0.05},
    }
    return base | others


LAYOUTS: list[dict[str, Any]] = [
    {"layout": {"shard": 4}},
    {"layout": {"shard": 4}, "memory": {"zero": 1}},
    {"layout": {"shard": 2, "replicate": 2}, "memory": {"zero": 2}},
    {"layout": {"replicate": 3}},
    {"layout": {"shard": 2}, "batch": {"global_samples": SAMPLES, "micro_samples": 2, "denominator": "samples"}},
]


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("split", ["rows", "columns"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_split_tables_are_the_model_of_one_process(ranks, tmp_path: Path, layout: dict[str, Any], split: str) -> None:
    """Loss, every gradient, the clipped update, in float64 over two steps."""
    axes = layout["layout"]
    size = axes.get("shard", 1) * axes.get("replicate", 1)
    verdict, *_ = ranks(size, verified, tables(split) | layout, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


def bytes_and_rows(place: TestPlace, choice: dict[str, Any], folder: str) -> tuple[int, int, list[int]]:
    """Bytes that a step sends, the rows with a gradient here, and the shape of the table here."""
    run_file = run_file_of(Path(folder), **choice, wire={"check_collectives": False})
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    with closing(run.feed()) as feed:
        run.mesh.ledger.take()
        result = run.step(1, feed.next().microbatches, lr=0.1)
    weight = run.model.get_parameter("table.weight")
    assert weight.grad is not None
    return result.bytes_sent, len(weight.grad.coalesce().values()), list(weight.shape)


@pytest.mark.parametrize("layout", [{"shard": 4}, {"replicate": 2}], ids=str)
def test_bytes_follow_the_rows_touched_and_not_the_table(ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    """A table of fifty times the rows sends as much, but for ids that fewer samples share."""
    size = layout.get("shard", 1) * layout.get("replicate", 1)
    small = ranks(size, bytes_and_rows, tables(layout=layout), str(tmp_path))
    large = ranks(size, bytes_and_rows, tables(rows=50_000, layout=layout), str(tmp_path))
    for (few, _, _), (many, rows, shape) in zip(small, large, strict=True):
        assert rows <= SAMPLES * 3
        assert many < 1.5 * few
        assert many < 50_000 * 8 * 4 / 50
        assert shape == [50_000 // layout.get("shard", 1), 8]


def test_a_checkpoint_of_split_tables_goes_on_under_another_split(ranks, tmp_path: Path) -> None:
    """Rows over four ranks, then columns over two, then one process: the same state comes out that went in."""
    first = ranks(4, travel, tables("rows", layout={"shard": 4}), str(tmp_path), "run", 2)[0]
    second = ranks(2, travel, tables("columns", layout={"shard": 2}), str(tmp_path), "run", 2)[0]
    third = ranks(1, travel, tables("rows"), str(tmp_path), "run", 1)[0]
    assert {"model/table.weight", "optimizer/sum/table.weight"} <= first.left.keys()
    assert all(torch.equal(values, second.came[name]) for name, values in first.left.items())
    assert all(torch.equal(values, third.came[name]) for name, values in second.left.items())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"kind": "adamw", "lr": 0.1}}, 'use "adagrad", or "sgd" without momentum'),
    ({"layout": {"tensor": 2}}, "set pipeline, context, tensor and expert to 1"),
    ({"sync": {"kind": "local"}, "layout": {"replicate": 2}}, 'sync.kind = "local" needs dense ones'),
]


@pytest.mark.parametrize(("choice", "words"), REFUSED, ids=str)
def test_what_needs_dense_gradients_is_refused(ranks, tmp_path: Path, choice: dict[str, Any], words: str) -> None:
    """By a sentence that names the key and the way out."""
    outcomes = ranks.outcomes(2, bytes_and_rows, tables() | choice, str(tmp_path))
    assert all(not worked and words in str(said) for worked, said in outcomes), outcomes


def test_an_id_outside_of_the_table_is_refused() -> None:
    """With the range that was found and the one that is allowed."""
    table = shoal.EmbeddingTable(5, 2)
    with pytest.raises(UserCodeError, match="ids from 0 to 5; ids must lie between 0 and 4"):
        table(torch.tensor([0, 5]))
