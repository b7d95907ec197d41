"""Embedding tables that live on servers alone: rows are pulled in the forward, gradients pushed in the backward."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import programs
from tests.assembly.test_embedding_tables import tables
from tests.ranks import TestPlace
from tests.sync.test_server import AMPLIFIED, Trained, distance, opened, server, train

FLOAT64: dict[str, Any] = {"precision": {"kind": "float64"}}
BATCH: dict[str, Any] = {"batch": {"global_samples": 12, "denominator": "samples"}}
ADAGRAD: dict[str, Any] = {"optimizer": {"kind": "adagrad", "lr": 0.1, "clip_norm": None}}
STEPS = 8
ROOT = Path(__file__).parents[2]


def choice(sync: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return tables(**keys) | FLOAT64 | BATCH | ADAGRAD | sync


@pytest.mark.parametrize(
    ("size", "sync"),
    [(2, server()), (3, server(servers=1)), (4, server("bounded", bound=0, period=4, servers=2))],
    ids=["every rank serves", "a server", "two servers, bounded by 0"],
)
def test_served_tables_are_the_model_of_one_process(ranks, tmp_path: Path, size: int, sync: dict[str, Any]) -> None:
    """All weights and Adagrad's sums after eight steps, in float64; all ranks end with the same dense bits."""
    found: list[Trained] = ranks(size, train, choice(sync), str(tmp_path), 0, STEPS)
    one: Trained = ranks(1, train, choice({}), str(tmp_path), 0, STEPS)[0]
    assert found[0].state.keys() == one.state.keys()
    assert {"model/table.weight", "optimizer/sum/table.weight"} <= one.state.keys()
    assert distance(found[0].state, one.state) < AMPLIFIED
    torch.testing.assert_close(
        found[0].state["optimizer/sum/table.weight"], one.state["optimizer/sum/table.weight"], rtol=1e-9, atol=1e-15
    )


def test_a_run_with_served_tables_goes_on_elsewhere(ranks, tmp_path: Path) -> None:
    """From servers to one process and to other servers, by its checkpoint."""
    folder = str(tmp_path)
    one = ranks(1, train, choice({}), folder, 0, STEPS)[0]
    ranks(3, train, choice(server(servers=1)), folder, 0, 3, "moves", STEPS)
    ranks(1, train, choice({}), folder, 3, 5, "moves", STEPS)
    found = ranks(2, train, choice(server()), folder, 5, STEPS, "moves")[0]
    assert distance(found.state, one.state) < AMPLIFIED


@pytest.mark.parametrize("sync", [server("async", period=4), server("backup", backup=1, period=4, servers=1)], ids=str)
def test_asynchronous_rows_move_and_stay_finite(ranks, tmp_path: Path, sync: dict[str, Any]) -> None:
    """Rows that a step has touched have changed, and no others."""
    found = ranks(3, train, choice(sync), str(tmp_path), 0, STEPS)
    before = ranks(1, train, choice({}), str(tmp_path), 0, 0)[0].state["model/table.weight"]
    after = found[0].state["model/table.weight"]
    assert bool(torch.isfinite(after).all())
    moved = (after != before).any(1)
    touched = found[0].state["optimizer/sum/table.weight"].ne(0).any(1)
    assert torch.equal(moved, touched)
    assert 0 < int(moved.sum()) < len(after)


def step_with(place: TestPlace, keys: dict[str, Any], folder: str) -> tuple[int, int, dict[str, float]]:
    """Bytes that a step sends; bytes that this rank keeps of the table as its parameter; what an evaluation finds."""
    run = opened(place, keys, folder, Path(folder) / "bytes", 2)
    with closing(run.feed()) as feed:
        run.mesh.ledger.take()
        sent = run.step(1, feed.next().microbatches, lr=0.1).bytes_sent
    return sent, run.model.get_parameter("table.weight").untyped_storage().nbytes(), run.evaluate()


def test_bytes_follow_the_rows_touched_and_not_the_table(ranks, tmp_path: Path) -> None:
    """A table of fifty times the rows sends as much, but for ids that fewer samples share; workers keep one number."""
    sync = server(servers=1)
    small = ranks(3, step_with, choice(sync) | {"wire": {"check_collectives": False}}, str(tmp_path))
    large = ranks(3, step_with, choice(sync, rows=50_000) | {"wire": {"check_collectives": False}}, str(tmp_path))
    for (few, _, _), (many, kept, _) in zip(small, large, strict=True):
        assert many < 1.5 * few
        assert kept == 8


def test_an_evaluation_looks_rows_up_at_the_servers(ranks, tmp_path: Path) -> None:
    """After a step of the recipe every rank, servers too, finds the loss that one process finds."""
    recipe = {
        "model": {"kind": "python", "build": "recipes.models.dlrm:build", "arguments": {"rows": 500}},
        "data": {"kind": "python", "build": "recipes.models.dlrm:clicks", "arguments": {"rows": 500}},
        "batch": {"global_samples": 12, "denominator": "samples"},
        "observe": {"evaluate_samples": 31},
    }
    found = ranks(3, step_with, recipe | FLOAT64 | ADAGRAD | server(servers=1), str(tmp_path))
    one = ranks(1, step_with, recipe | FLOAT64 | ADAGRAD, str(tmp_path))[0]
    assert [figures["loss/eval"] for _, _, figures in found] == pytest.approx([one[2]["loss/eval"]] * 3, rel=1e-9)


@pytest.mark.slow
def test_the_recipe_trains_evaluates_and_saves_with_a_server(tmp_path: Path) -> None:
    """`shoal train`, with what it compares between ranks before evaluations and saves."""
    keys = ["run.processes=3", "sync.kind=server", "sync.servers=1", "run.steps=4", "observe.evaluate_every_steps=2"]
    keys += ["checkpoint.every_steps=2", "model.arguments={rows=500}", "data.arguments={rows=500}"]
    done = programs.run(["-m", "shoal", "train", "recipes/dlrm.toml", f"run.directory={tmp_path}", *keys], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        (server(topology="hybrid"), 'sync.topology = "hybrid"'),
        (server("async", staleness="compensated"), 'sync.staleness = "compensated"'),
    ],
)
def test_what_cannot_serve_tables_is_refused(ranks, tmp_path: Path, sync: dict[str, Any], words: str) -> None:
    """By a sentence that names the key and the way out."""
    outcomes = ranks.outcomes(2, step_with, choice(sync), str(tmp_path))
    assert all(not worked and words in str(said) for worked, said in outcomes), outcomes
