"""Data sets of a script's own, read by processes: the same samples for any number of readers and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.warm_scripts import run_script
from tests.waiting import NEVER_S

SCRIPT = """
import json
import random
import numpy as np
import torch
import shoal


class Noisy:
    def __init__(self):
        self.label = lambda i: i % 3  # which cannot be pickled

    def __len__(self):
        return 12

    def __getitem__(self, i):
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(i), *noise]), self.label(i)


table = {"reader_kind": "processes", "readers": READERS}
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run = shoal.start({"run": {"name": "mine"}, "data": table, "wire": {"timeout_s": NEVER_S}}, model=model,
                  optimizer=optimizer, data=Noisy(), batch_samples=4, steps=6)
used = open(f"used-{run.rank}.jsonl", "w", buffering=1)
for step, microbatches in run.steps():
    for x, y in microbatches:
        used.write(json.dumps([step, x.tolist()]) + "\\n")
        run.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
run.close()
"""


def used(folder: Path, *, world: int, readers: int) -> list[list[list[float]]]:
    """The samples of each step."""
    folder.mkdir()
    (folder / "mine.py").write_text(SCRIPT.replace("READERS", str(readers)).replace("NEVER_S", str(NEVER_S)))
    assert run_script(folder / "mine.py", folder, world=world) == [0] * world, (folder / "rank-0.txt").read_text()
    steps: dict[int, list[list[float]]] = {}
    for rank in range(world):
        for step, rows in map(json.loads, (folder / f"used-{rank}.jsonl").read_text().splitlines()):
            steps.setdefault(step, []).extend(rows)
    return [steps[step] for step in sorted(steps)]


@pytest.mark.stress
def test_samples_are_the_same_for_any_readers_and_ranks(tmp_path: Path) -> None:
    """What a data set draws from the generators of Python, numpy and torch follows from seed, epoch and sample."""
    one = used(tmp_path / "one", world=1, readers=1)
    assert used(tmp_path / "several", world=2, readers=2) == one
    noise = {int(row[0]): row[1:] for row in one[0] + one[1] + one[2]}
    assert len(noise) == 12
    assert all(noise[int(row[0])] != row[1:] for row in one[3] + one[4] + one[5]), "the next epoch draws anew"
