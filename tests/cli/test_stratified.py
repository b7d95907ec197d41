"""`data.stratify` in real runs: the order follows from classes and seed alone, whatever ranks and readers there are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.data.sampling import LengthOrder, StratifiedOrder
from tests.cli.project import OWN, RUN, Project

SAMPLES, BATCH, STEPS = 30, 6, 10
CLASSES = """

def classes(data):
    return ["rare" if i % 5 == 0 else "common" for i in range(len(data))]


def wrong(data):
    return [0]
"""


@pytest.fixture
def own(tmp_path: Path) -> Project:
    (tmp_path / "own.py").write_text(OWN + CLASSES)
    table = RUN.replace("global_samples = 5", f"global_samples = {BATCH}").replace("steps = 9", f"steps = {STEPS}")
    (tmp_path / "run.toml").write_text(table.replace('"own:data"', '"own:data"\nstratify = "own:classes"'))
    return Project(tmp_path)


def used(own: Project) -> dict[int, list[int]]:
    """The samples of each step, of those that were taken twice the last time."""
    found: dict[int, list[int]] = {}
    for line in map(json.loads, (own.folder / "used.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], []).extend(line["ids"])
    return {step: sorted(ids[-BATCH:]) for step, ids in found.items()}


@pytest.mark.slow
def test_other_ranks_and_readers_go_on_in_the_same_order(own: Project) -> None:
    """Two ranks of which one fails in step 7, then three with readers in processes."""
    failed = own.shoal("train", "run.toml", "run.processes=2", "model.arguments.fail_at=7")
    assert failed.returncode != 0
    resumed = own.shoal("train", "run.toml", "run.processes=3", 'data.reader_kind="processes"', "data.readers=2")
    assert resumed.returncode == 0, resumed.stderr
    strata = (np.arange(SAMPLES) % 5 == 0).astype(np.int64)  # "common" comes before "rare"
    order = StratifiedOrder(strata, 0).ids(np.arange(STEPS * BATCH)).reshape(STEPS, BATCH)
    assert used(own) == {step: sorted(ids.tolist()) for step, ids in enumerate(order, start=1)}
    rare = [sum(i % 5 == 0 for i in ids) for ids in used(own).values()]
    assert sum(rare[:5]) == sum(rare[5:]) == 6
    assert max(rare) <= 3


@pytest.mark.slow
def test_a_subset_by_length_is_resumed_by_other_ranks(own: Project) -> None:
    """As above; of the 30 samples 21 are used, and each step has those of like length."""
    more = "\n\ndef lengths(data):\n    return [i * i % 31 for i in range(len(data))]\n"
    more += "\n\ndef some(data):\n    return [i for i in range(len(data)) if i % 10 < 7]\n"
    (own.folder / "own.py").write_text((own.folder / "own.py").read_text() + more)
    text = (own.folder / "run.toml").read_text()
    keys = 'group_by_length = "own:lengths"\nsubset = "own:some"'
    (own.folder / "run.toml").write_text(text.replace('stratify = "own:classes"', keys))
    assert own.shoal("train", "run.toml", "run.processes=2", "model.arguments.fail_at=7").returncode != 0
    resumed = own.shoal("train", "run.toml", "run.processes=3")
    assert resumed.returncode == 0, resumed.stderr
    some = np.array([i for i in range(SAMPLES) if i % 10 < 7])
    order = LengthOrder((some * some % 31).astype(np.float64), 0, step=BATCH, straddle=True).ids(
        np.arange(STEPS * BATCH)
    )
    assert used(own) == {
        step: sorted(some[ids].tolist()) for step, ids in enumerate(order.reshape(STEPS, BATCH), start=1)
    }
    for key, said in (
        ("data.subset=0.7", "data.subset = "),
        ("batch.global_samples=12", "the samples of a step by length"),
    ):
        refused = own.shoal("train", "run.toml", "--resume", "run.processes=1", "run.steps=12", key)
        assert refused.returncode == 2
        assert said in refused.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('data.stratify="own:wrong"', "data.stratify gives int64 [1] for 30 samples"),
        ('data.stratify="targets"', "the training data has no attribute `targets`"),
        ('data.stratify="own"', 'it takes "targets" or a function, as package.module:function'),
        ("data.shuffle=false", "leave out shuffle and shuffle_window"),
        ('data.build="own:endless"', "this data has no number of samples; leave it out"),
    ],
)
def test_bad_strata(own: Project, override: str, said: str) -> None:
    """A sentence each, and exit code 2."""
    (own.folder / "own.py").write_text((own.folder / "own.py").read_text() + "\n\ndef endless():\n    yield 1, 1\n")
    refused = own.shoal("train", "run.toml", "run.processes=1", override)
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_another_order_is_not_resumed(own: Project) -> None:
    """A run keeps the classes that it was begun with."""
    assert own.shoal("train", "run.toml", "run.processes=1", "run.steps=2").returncode == 0
    (own.folder / "own.py").write_text((own.folder / "own.py").read_text() + "\n\nother = classes\n")
    refused = own.shoal("train", "run.toml", "--resume", "run.processes=1", 'data.stratify="own:other"')
    assert refused.returncode == 2
    assert "was trained with data.stratify = 'own:classes', and now it is 'own:other'" in refused.stderr
