"""Shoal's own sources of data in a script's own loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.data.order import Order
from shoal.errors import ConfigError
from tests.cli.warm_scripts import run_script
from tests.data.sources import SAMPLES, written

SCRIPT = """
import json
import torch
import shoal

model = torch.nn.Linear(2, 7)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run = shoal.start(CONFIG, model=model, optimizer=optimizer, batch_samples=6, DATA)
used = open(f"used-{run.rank}.jsonl", "a")
for step, microbatches in run.steps():
    for x, y in microbatches:
        used.write(json.dumps([step, x[:, 0].long().tolist(), y.tolist(), run.weights.tolist()]) + "\\n")
        used.flush()
        run.backward(torch.nn.functional.cross_entropy(model(x.float()), y))
    optimizer.step()
run.close()
"""


def used(folder: Path, world: int) -> list[int]:
    """The samples of each step in order, as whoever came to the step last read them."""
    steps: dict[int, dict[int, list[int]]] = {}
    for rank in range(world):
        path = folder / f"used-{rank}.jsonl"
        for step, xs, ys, weights in map(json.loads, path.read_text().splitlines()):
            assert ys == [x % 7 for x in xs]
            if weights == [0.0]:
                continue  # a copy, in a short step without samples for this rank
            assert weights == [1.0] * len(xs)
            steps.setdefault(step, {})[rank] = xs
    return [x for step in sorted(steps) for rank in sorted(steps[step]) for x in steps[step][rank]]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["keyword", "run file"])
def test_a_loop_reads_parquet(way: str, tmp_path: Path) -> None:
    """Two epochs on three ranks, with a short last step: every row twice, in the order of the seed."""
    table = written("parquet", tmp_path / "data")
    config, data = ({"batch": {"epoch_end": "short"}}, f"epochs=2, data={table!r}")
    if way == "run file":
        config, data = ({**config, "data": table}, "epochs=2")
    (tmp_path / "mine.py").write_text(SCRIPT.replace("CONFIG", repr(config)).replace("DATA", data))
    assert run_script(tmp_path / "mine.py", tmp_path, world=3) == [0] * 3, (tmp_path / "rank-0.txt").read_text()
    assert used(tmp_path, 3)[: 2 * SAMPLES] == Order(SAMPLES, 0).ids(np.arange(2 * SAMPLES)).tolist()


@pytest.mark.stress
def test_a_loop_over_jsonl_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Two ranks, one of which dies, and then three: what counts is the order of the seed, each sample once."""
    table = written("jsonl", tmp_path / "data")
    text = SCRIPT.replace("CONFIG", "{}").replace("DATA", f"steps=12, data={table!r}")
    (tmp_path / "mine.py").write_text(text)
    codes = run_script(tmp_path / "mine.py", tmp_path, "checkpoint.every_steps=3", world=2, dies_at=8)
    assert codes[1] == -9
    first = used(tmp_path, 2)[: 6 * 7]
    assert first == Order(SAMPLES, 0).ids(np.arange(6 * 7)).tolist()
    for rank in range(2):
        (tmp_path / f"used-{rank}.jsonl").unlink()
    assert run_script(tmp_path / "mine.py", tmp_path, world=3) == [0] * 3
    rest = used(tmp_path, 3)
    assert rest == Order(SAMPLES, 0).ids(np.arange(72 - len(rest), 72)).tolist()
    assert len(rest) in (72 - 18, 72 - 36)


def test_data_that_a_script_opens(tmp_path: Path) -> None:
    """The samples of a table, by their number."""
    opened = shoal.open_data(written("jsonl", tmp_path))
    assert len(opened.train) == SAMPLES
    sample = opened.train[9]
    assert (int(sample["inputs"][0]), int(sample["targets"])) == (9, 2)
    with pytest.raises(ConfigError, match="inpts"):
        shoal.open_data({"kind": "jsonl", "files": ["x"], "inpts": "a", "targets": "b"})


CHANGED = """
import torch
import shoal

class Grows(torch.utils.data.Dataset):
    level = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((2,), float(self.level)), index % 7

data, model = Grows(), torch.nn.Linear(2, 7)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run = shoal.start({"run": {"name": "t"}}, ["data.prefetch_steps=PREFETCH"], model=model, optimizer=optimizer, data=data,
                  batch_samples=4, steps=40)
for number, (x, y) in enumerate(run.batches()):
    data.level = number
    late = number - float(x.min())
    assert late <= PREFETCH + 1, (number, late)
    run.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
run.close()
"""


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_loop_that_changes_its_data_set_sees_the_change_soon(prefetch: int, tmp_path: Path) -> None:
    """Small steps are not read further ahead than `data.prefetch_steps` and one."""
    (tmp_path / "mine.py").write_text(CHANGED.replace("PREFETCH", str(prefetch)))
    assert run_script(tmp_path / "mine.py", tmp_path, world=1) == [0], (tmp_path / "rank-0.txt").read_text()


DRAWING = """
import random
import numpy as np
import torch
import shoal

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), DRAWN), index % 7

model = torch.nn.Linear(2, 7)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run = shoal.start({"run": {"name": "t"}}, model=model, optimizer=optimizer, data=Augmented(), batch_samples=4, steps=2)
for x, y in run.batches():
    run.backward(torch.nn.functional.cross_entropy(model(x), y) * (1 + random.random() + np.random.rand()))
    optimizer.step()
run.close()
"""


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ("1.0", "the model, or the loop around it, draws from Python's random and NumPy: every rank and microbatch"),
        ("np.random.rand()", "the data set, or its collate_fn, draws from NumPy: each rank and each run reads other"),
    ],
)
def test_who_draws_from_generators_that_all_share_is_told(drawn: str, said: str, tmp_path: Path) -> None:
    """Once; a data set that reads ahead in the same process takes numbers of the loop's away."""
    (tmp_path / "mine.py").write_text(DRAWING.replace("DRAWN", drawn))
    assert run_script(tmp_path / "mine.py", tmp_path, world=1) == [0], (tmp_path / "rank-0.txt").read_text()
    assert " ".join((tmp_path / "rank-0.txt").read_text().split()).count(said) == 1
