"""Every kind of data gives each sample once, in the order of the seed, whoever reads it and wherever it resumes."""

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.data.cursor import Cursor
from shoal.data.dataset import Dataset
from shoal.data.feed import Feed, StepShare
from tests.data.sources import CLASSES, KINDS, SAMPLES, built, number_of, written

SEED = 11
STEP = 6
RANKS_AND_READERS = ((1, 2), (3, 1), (2, 4), (4, 3))
"""What the run has between one kill and the next."""


def interrupted(dataset: Dataset, kind: str, *, window: int | None = None) -> list[int]:
    """The samples of the steps that were committed while ranks and readers changed, each last step being killed."""
    cursor, used = Cursor(), []
    order = dataset.order(SEED, shuffle=True, window=window)
    for ranks, readers in RANKS_AND_READERS:
        feeds = [
            Feed(
                dataset.train,
                order,
                StepShare(STEP, rank, ranks, micro_samples=2),
                start=cursor,
                readers=readers,
            )
            for rank in range(ranks)
        ]
        for step in range(6):
            steps = [each.next() for each in feeds]
            behind, taken = cursor.take(STEP)
            assert {each.interval for each in steps} == {taken}
            if step < 5:
                cursor = behind
                batches = [batch for each in steps for batch in each.microbatches]
                used += [number_of(kind, row.numpy()) for batch in batches for row in batch.inputs]  # type: ignore[union-attr]
        for each in feeds:
            each.close()
        cursor = Cursor.from_state(cursor.to_state())
    return used


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_come_exactly_once_in_the_order_of_the_seed(kind: str, window: int | None, tmp_path: Path):
    """With 1 to 4 ranks and readers, changed at three kills in mid-epoch, the first epoch is a permutation, and all
    samples are those that the order of the seed names."""
    dataset = built(written(kind, tmp_path / "data"), tmp_path / "cache")
    used = interrupted(dataset, kind, window=window)
    assert len(used) == STEP * 5 * len(RANKS_AND_READERS)
    assert sorted(used[:SAMPLES]) == list(range(SAMPLES))
    assert used == dataset.order(SEED, shuffle=True, window=window).ids(np.arange(len(used))).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_what_was_written(kind: str, tmp_path: Path):
    """Every sample by number, with its target; a second opening, with indexes from the cache, gives the same."""
    table = written(kind, tmp_path / "data")
    for _ in range(2):
        train = built(table, tmp_path / "cache").train
        assert len(train) == SAMPLES
        for i in range(SAMPLES):
            sample = train[i]
            inputs, target = (sample["inputs"], sample["targets"]) if isinstance(sample, dict) else sample
            assert number_of(kind, np.asarray(inputs)) == i
            assert int(target) == (int(i >= 41) if kind == "images" else i % CLASSES)


@pytest.mark.parametrize("kind", ["jsonl", "stream"])
def test_a_field_weighs_the_loss(kind: str, tmp_path: Path) -> None:
    """Beside keys that draw samples, which have other names."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"x": [float(n)], "y": n, "w": n / 2}) + "\n" for n in range(4)))
    files = {"files": [str(path)], "held_out_files": [str(path)]} if kind == "jsonl" else {"path": str(path)}
    table = {"kind": kind, "inputs": "x", "targets": "y", "loss_weights": "w", **files}
    dataset = built(table, tmp_path / "cache")
    with Feed(dataset.train, dataset.order(SEED, shuffle=False), StepShare(4)) as feed:
        assert feed.next().microbatches[0].weights.tolist() == [0.0, 0.5, 1.0, 1.5]
