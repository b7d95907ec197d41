"""Samplers of a script's DataLoader: the same samples in every step on any number of ranks, and through a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.warm_scripts import run_script

SCRIPT = """
import json
import torch
import torch.nn.functional as F
import torch.utils.data as D
import shoal

torch.manual_seed(0)
x = torch.arange(20.0)[:, None]
data = D.TensorDataset(x, (x[:, 0] > 9).long())
weights = [i % 5 for i in range(20)]
model = torch.nn.Linear(1, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = D.DataLoader(data, batch_size=6, sampler=SAMPLER)
run = shoal.start(model=model, optimizer=optimizer, data=loader, epochs=3)
for step, batches in run.steps():
    for x, y in batches:
        run.backward(F.cross_entropy(model(x), y))
        ids = x[:, 0].int().tolist() if run.samples else []
        print("TAKEN", json.dumps([step, ids]), flush=True)
    optimizer.step()
run.close()
"""


def taken(folder: Path, sampler: str, *lives: tuple[str, ...], world: int) -> dict[int, list[int]]:
    """The samples of each step, sorted: ranks print theirs in any order."""
    folder.mkdir()
    (folder / "mine.py").write_text(SCRIPT.replace("SAMPLER", sampler))
    found: dict[int, list[int]] = {}
    for overrides in lives or ((),):
        codes = run_script(folder / "mine.py", folder, *overrides, world=world)
        said = [(folder / f"rank-{rank}.txt").read_text() for rank in range(world)]
        assert codes == [0] * world, said[0]
        for line in (line for text in said for line in text.splitlines() if line.startswith("TAKEN")):
            step, ids = json.loads(line.removeprefix("TAKEN"))
            found[step] = sorted([*found.get(step, []), *ids])
    return found


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("world", [3, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        "D.WeightedRandomSampler(weights, 16)",
        "D.WeightedRandomSampler(weights, 10, replacement=False)",
        "D.SubsetRandomSampler([2, 3, 5, 7, 11, 13, 17, 19])",
        "D.RandomSampler(data, replacement=True, num_samples=25)",
        "D.DistributedSampler(data, num_replicas=2, rank=1)",
    ],
)
def test_ranks_and_resumes_change_nothing(tmp_path: Path, sampler: str, world: int) -> None:
    """Ended after step 3 and started again on as many ranks: the samples of one process, step by step."""
    one = taken(tmp_path / "one", sampler, world=1)
    assert taken(tmp_path / "several", sampler, ("run.steps=3",), (), world=world) == one
    drawn = {sample for ids in one.values() for sample in ids}
    if "Weighted" in sampler:
        assert not drawn & {0, 5, 10, 15}
    if "Subset" in sampler:
        assert drawn == {2, 3, 5, 7, 11, 13, 17, 19}
    if "Distributed" in sampler:
        assert drawn == set(range(20))
        assert len(one[1]) == 8
        assert "DistributedSampler is not used" in (tmp_path / "one/rank-0.txt").read_text()
