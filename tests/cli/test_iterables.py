"""Iterables as the data of runs on several ranks: each item once, or a sentence why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.warm_scripts import run_script

ITEMS = 20
LOOP = """
import json
import os
import torch
import shoal

RANK = int(os.environ["RANK"])


def items():
    for i in range(20):
        yield torch.tensor([float(i), 1.0]), i % 7


def counted(start=0):
    print(f"begun at {start}\\n", end="", flush=True)  # in one piece: others write too
    while True:
        yield torch.tensor([float(start % 20), 1.0]), start % 20 % 7
        start += 1


def of_rank():
    yield from (item for i, item in enumerate(items()) if i % 2 == RANK)


def of_length():
    yield from (item for i, item in enumerate(items()) if i < 18 - RANK)


def torn():
    for i, item in enumerate(items()):
        yield None if i == 9 else item


model = torch.nn.Linear(2, 7)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run = shoal.start(model=model, optimizer=optimizer, DATA)
used = open(f"used-{run.rank}.jsonl", "a")
for step, microbatches in run.steps():
    for x, y in microbatches:
        used.write(json.dumps([step, x[:, 0].long().tolist(), y.tolist()]) + "\\n")
        used.flush()
        run.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
run.close()
"""


def start(folder: Path, data: str, *overrides: str, world: int, dies_at: int = 0) -> list[int]:
    (folder / "mine.py").write_text(LOOP.replace("DATA", data))
    return run_script(folder / "mine.py", folder, *overrides, world=world, dies_at=dies_at)


def used(folder: Path, world: int) -> dict[int, list[int]]:
    """The items of each step, which are then forgotten."""
    steps: dict[int, dict[int, list[int]]] = {}
    for rank in range(world):
        path = folder / f"used-{rank}.jsonl"
        for step, xs, ys in map(json.loads, path.read_text().splitlines()):
            assert ys == [x % 7 for x in xs]
            steps.setdefault(step, {})[rank] = xs
        path.unlink()
    return {step: [x for rank in sorted(of) for x in of[rank]] for step, of in sorted(steps.items())}


@pytest.mark.slow
@pytest.mark.parametrize("items", ["items", "counted"])
def test_a_loop_goes_on_in_mid_pass(items: str, tmp_path: Path) -> None:
    """One of two ranks dies in step 6, and three ranks go on from the checkpoint of step 4, in the second pass over 20
    items: position p has item p % 20. A function with `start` is asked for what follows."""
    data = f"data={items}, batch_samples=6, steps=8"
    assert start(tmp_path, data, "checkpoint.every_steps=2", world=2, dies_at=6)[1] == -9
    first = used(tmp_path, 2)
    assert start(tmp_path, data, world=3) == [0] * 3, (tmp_path / "rank-0.txt").read_text()
    second = used(tmp_path, 3)
    for step, items_of_step in (*first.items(), *second.items()):
        assert items_of_step == [p % ITEMS for p in range(6 * step, 6 * step + 6)]
    begun = min(second)
    assert begun in (2, 4)
    assert sorted(second) == list(range(begun, 8))
    if items == "counted":
        assert f"begun at {6 * begun}\n" in (tmp_path / "rank-0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "rank", "sentence"),
    [
        ("data=of_rank", 1, "rank 1 has another data than rank 0: 'training sample 0: "),
        ("data=of_length", None, "every rank must be given the same items in the same order, and Shoal divides them"),
        ("data=items()", None, "the data, a generator, ended before item 20, counted from 0, which the run needs"),
        ("data=torn", None, "Sample 9 at position 9: The data set's sample is None"),
        ("data=3", 0, "the data is of type int; shoal.start takes a data set with len(d) and d[i]"),
        ("data=(items, counted)", 0, "the data of counted() gives more than 100,000 items to evaluate on"),
    ],
)
def test_an_iterable_that_cannot_be_trained_on(data: str, rank: int | None, sentence: str, tmp_path: Path) -> None:
    """It ends every rank, and the one that found it says what to mend, without a traceback."""
    codes = start(tmp_path, f"{data}, batch_samples=6, steps=8", world=2)
    texts = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert 2 in codes, texts
    assert 0 not in codes
    assert sentence in ("".join(texts) if rank is None else texts[rank])
    assert "Traceback" not in "".join(texts)


TRAIN = """
import torch
import shoal

torch.manual_seed(0)
model = torch.nn.Linear(2, 3)
config = {
    "run": {"name": "NAME", "steps": 7},
    "batch": {"global_samples": 6},
    "data": DATA,
    "optimizer": {"lr": 0.1},
}
shoal.train(config, model=model)
"""
FEEDS = """
import torch
from torch.utils.data import IterableDataset


def samples():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, generator=generator), i % 3) for i in range(20)]


class Rows(IterableDataset):
    def __iter__(self):
        return iter(samples())


def rows(count):
    yield from samples()[:count]


def pair():
    return Rows(), samples()


def iterables():
    return Rows(), rows(20)
"""


@pytest.mark.slow
def test_an_iterable_by_name_trains_as_the_list_of_its_items(tmp_path: Path) -> None:
    """On two ranks the losses, of evaluations too, are those of a data set with the same samples in the same order, bit
    for bit.
    """
    (tmp_path / "feeds.py").write_text(FEEDS)
    tables = {
        "list": {"kind": "python", "build": "feeds:samples", "shuffle": False},
        "function": {"kind": "python", "build": "feeds:rows", "arguments": {"count": 20}},
        "iterable": {"kind": "python", "build": "feeds:pair"},
        "iterables": {"kind": "python", "build": "feeds:iterables"},
    }
    losses, evaluated = {}, {}
    for name, table in tables.items():
        (tmp_path / "mine.py").write_text(TRAIN.replace("NAME", name).replace("DATA", repr(table)))
        assert run_script(tmp_path / "mine.py", tmp_path, world=2) == [0] * 2, (tmp_path / "rank-0.txt").read_text()
        events = (tmp_path / "runs" / name / "events" / "rank-00000.jsonl").read_text().splitlines()
        found = [json.loads(event)["values"] for event in events]
        losses[name] = [values["loss/train"] for values in found if "loss/train" in values]
        evaluated[name] = [values["loss/eval"] for values in found if "loss/eval" in values]
    assert len(losses["list"]) == 7
    assert losses["function"] == losses["iterable"] == losses["iterables"] == losses["list"]
    assert evaluated["iterables"] == evaluated["iterable"] != []
