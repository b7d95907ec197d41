"""A DataLoader that the batch does not divide: a loop takes the batches of the DataLoader, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.observe.events import read_events
from tests.cli.warm_scripts import run_plain, run_script

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(50, 8)
targets = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True, drop_last=DROP_LAST)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, epochs=2, steps_per_epoch=len(loader))
"""
PLAIN = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"loss {loss.item()!r}")
"""
OWN = """
import shoal
run = shoal.start(model=model, optimizer=optimizer, data=loader, epochs=2, state={"scheduler": scheduler})
seen = [0, 0]
for epoch, loader in run.epochs():
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        if run.update:
            scheduler.step()
        seen[epoch] += run.samples
print("seen", *(int(run.sum(count)) for count in seen))
"""
TOLERANCE = 1e-5
"""Relative, of 10 steps: docs/reference/tolerances.md."""


@pytest.fixture(params=[False, True], ids=["short", "drop_last"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[bool, list[float]]:
    """Whether the last batch is dropped, and the losses of the script without Shoal."""
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT.replace("DROP_LAST", str(request.param)) + PLAIN)
    return request.param, [
        float(text) for text in re.findall(r"loss (\S+)$", run_plain(script, tmp_path), re.MULTILINE)
    ]


def losses(folder: Path) -> list[float]:
    events = read_events(folder / "runs/own", 0)
    found = {event.step: loss for event in events if (loss := event.get("loss/train")) is not None}
    return [found[step] for step in sorted(found)]


def own(folder: Path, drop_last: bool, *overrides: str, world: int, dies_at: int = 0) -> list[int]:
    script = folder / "own.py"
    script.write_text(SCRIPT.replace("DROP_LAST", str(drop_last)) + OWN)
    return run_script(script, folder, *overrides, world=world, dies_at=dies_at)


@pytest.mark.slow
@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("layout", ["3", "2 layout.shard=2 memory.zero=3 batch.micro_samples=5"])
def test_the_batches_are_those_of_the_loader(plain: tuple[bool, list[float]], layout: str, tmp_path: Path) -> None:
    """Losses, steps and rates are those of the script without Shoal: 5 steps an epoch, the last of 2 samples for 3
    ranks; or 4 where the loader drops it."""
    drop_last, expected = plain
    world, *overrides = layout.split()
    assert own(tmp_path, drop_last, *overrides, world=int(world)) == [0] * int(world), (
        tmp_path / "rank-0.txt"
    ).read_text()
    assert len(expected) == (8 if drop_last else 10)
    assert losses(tmp_path) == pytest.approx(expected, rel=TOLERANCE)
    assert ("seen 48 48" if drop_last else "seen 50 50") in (tmp_path / "rank-0.txt").read_text()


@pytest.mark.stress
def test_a_kill_in_the_second_epoch(plain: tuple[bool, list[float]], tmp_path: Path) -> None:
    """One of two ranks dies behind the first epoch's end, and three go on: the losses of the script without Shoal."""
    drop_last, expected = plain
    codes = own(tmp_path, drop_last, "checkpoint.every_steps=2", world=2, dies_at=7)
    assert codes[1] == -9
    assert own(tmp_path, drop_last, world=3) == [0] * 3, (tmp_path / "rank-0.txt").read_text()
    assert losses(tmp_path) == pytest.approx(expected, rel=TOLERANCE)
    assert re.search("resuming from the checkpoint of step [2468]", (tmp_path / "rank-0.txt").read_text())
