"""`gather_samples`: a loss over the embeddings of all ranks is that of one process, or is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shoal
from shoal.assembly.run import open_run
from shoal.launcher.environment import Place
from tests.ranks import TestPlace
from tests.verification.layouts import run_file_of, verified

HERE = "tests.verification.coupled_models"
CLIP: dict[str, Any] = {
    "model": {"kind": "python", "build": f"{HERE}:towers"},
    "data": {"kind": "python", "build": f"{HERE}:pairs"},
    "loss": {"kind": "python", "build": f"{HERE}:clip_loss"},
    "batch": {"global_samples": 7, "denominator": "samples"},
    "optimizer": {"kind": "sgd", "lr": 0.1},
}
"""Seven samples, so that no two ranks have equally many, and ranks that share a replica make one up."""

LAYOUTS: list[dict[str, Any]] = [
    {"layout": {"replicate": 2}},
    {"layout": {"replicate": 3}},
    {"layout": {"shard": 2}, "memory": {"zero": 1}},
    {"layout": {"shard": 2}, "memory": {"zero": 2}},
    {"layout": {"shard": 2}, "memory": {"zero": 3}},
    {"layout": {"replicate": 2, "shard": 2}, "memory": {"zero": 3}},
]


def _size(tables: dict[str, Any]) -> int:
    layout = tables["layout"]
    return layout.get("replicate", 1) * layout.get("shard", 1)


@pytest.mark.parametrize("tables", LAYOUTS, ids=str)
def test_a_loss_over_gathered_samples_is_that_of_one_process(ranks, tmp_path: Path, tables: dict[str, Any]) -> None:
    """In float64, over two steps: loss, gradients, weights."""
    verdict, *_ = ranks(_size(tables), verified, CLIP | tables, str(tmp_path), True, 2)
    assert verdict["holds"], verdict["sentence"]


def test_a_global_batch_in_microbatches_is_refused(ranks, tmp_path: Path) -> None:
    """Samples that are computed at another time cannot be gathered; the sentence says what to leave out."""
    tables = CLIP | {"layout": {"replicate": 2}, "batch": CLIP["batch"] | {"micro_samples": 2}}
    outcomes = ranks.outcomes(2, verified, tables, str(tmp_path), False, 1)
    assert all(not worked and "leave batch.micro_samples out" in str(said) for worked, said in outcomes), outcomes


def stepped(place: TestPlace, tables: dict[str, Any], folder: str) -> None:
    """One step."""
    run_file = run_file_of(Path(folder), **tables)
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=place.size))
    run = open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)
    with closing(run.feed()) as feed:
        run.step(1, feed.next().microbatches, lr=0.1)


def test_replicas_at_different_steps_have_nothing_to_gather(ranks, tmp_path: Path) -> None:
    """Local steps: a replica's batch is its own."""
    outcomes = ranks.outcomes(2, stepped, CLIP | {"layout": {"replicate": 2}, "sync": {"kind": "local"}}, str(tmp_path))
    assert all(not worked and 'sync.kind = "local"' in str(said) for worked, said in outcomes), outcomes


def test_outside_of_a_run_the_rows_are_those_of_the_process() -> None:
    """So that a loss can be tried at the prompt."""
    x = torch.randn(3, 2)
    samples, own = shoal.gather_samples(x)
    assert torch.equal(samples, x)
    assert own.tolist() == [0, 1, 2]
