"""Situations that people met with other systems, from their issue trackers, each in a loop of a script's own.

The script runs in plain PyTorch and on a layout, as `shoal verify mine.py` does it. Either the two are the same model,
or the comparison finds it, or the run is refused with a sentence: none trains another model with exit code 0.
docs/own-loop-situations.md is the table for people.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from shoal.verification.verdict import Verdict
from tests.cli.warm_scripts import compare_script

SCRIPT = """
import copy, math
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
import shoal

torch.manual_seed(0)
x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)
        self.extra()
    def extra(self):
        pass
    def forward(self, x):
        for block in self.blocks: x = torch.tanh(block(x))
        return self.head(x)
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
MODEL
class Model(Net):
    pass
CLASS
model = Model()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
OPTIMIZER
data = torch.utils.data.TensorDataset(x, y)
DATA
loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)
LOADER
run = shoal.start(KEYS, model=model, optimizer=optimizer, data=loader, epochs=2)
for x, y in run.batches():
    LOOP
"""
LOOP = "run.backward(loss_of(x, y)); optimizer.step(); optimizer.zero_grad()"
PLACES = ("MODEL", "CLASS", "OPTIMIZER", "DATA", "LOADER")

SITUATIONS = tomllib.loads((Path(__file__).parent / "cases" / "situations.toml").read_text())
SAME = [name for name, situation in SITUATIONS.items() if "told" not in situation]
TOLD = [name for name, situation in SITUATIONS.items() if "told" in situation]

LAYOUTS = {
    "2 ranks": (2, "batch.micro_samples=1"),
    "ZeRO-1": (2, "layout.shard=2", "memory.zero=1", "batch.micro_samples=2"),
    "ZeRO-2": (3, "layout.shard=3", "memory.zero=2", "batch.micro_samples=1"),
    "ZeRO-3": (2, "layout.shard=2", "memory.zero=3", "batch.micro_samples=2"),
}
OTHER_LAYOUT = {
    "synchronised batch norm": {"2 ranks": (2,), "ZeRO-1": (3, "layout.shard=3", "memory.zero=1")},
    "a contrastive loss, gathered with its gradient": {
        "ZeRO-1": (2, "layout.shard=2", "memory.zero=1"),
        "3 ranks": (3,),
    },
    "boxes on some images alone": {name: LAYOUTS[name] for name in ("ZeRO-2", "2 ranks")},
}
"""Without microbatches where the loss couples samples; ZeRO-3 needs every rank to call the same blocks."""


def script_of(situation: dict[str, str]) -> str:
    text = SCRIPT.replace("KEYS", situation.get("keys", "{}"))
    text = text.replace("    LOOP", "    " + situation.get("loop", LOOP).replace("\n", "\n    "))
    for place in PLACES:
        text = text.replace(f"\n{place}\n", f"\n{situation.get(place.lower(), '')}\n")
    return text


def compared(situation: dict[str, str], folder: Path, world: int, *keys: str) -> Verdict | str:
    (folder / "mine.py").write_text(script_of(situation))
    return compare_script(folder / "mine.py", folder, *keys, world=world)


def _same() -> list:
    cases = []
    for number, name in enumerate(SAME):
        layouts = OTHER_LAYOUT.get(name, LAYOUTS)
        often = list(layouts)[-1 - number % 2 if len(layouts) == 2 else -1 if number % 2 else number // 2 % 2]
        cases += [
            pytest.param(name, layout, marks=() if layout == often else pytest.mark.stress, id=f"{name}-{layout}")
            for layout in layouts
        ]
    return cases


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize(("name", "layout"), _same())
def test_it_is_the_model_of_plain_pytorch(name: str, layout: str, tmp_path: Path) -> None:
    """Loss, norm, gradients, weights and buffers of three steps, in float64."""
    world, *keys = OTHER_LAYOUT.get(name, LAYOUTS)[layout]
    verdict = compared(SITUATIONS[name], tmp_path, world, *keys)
    assert isinstance(verdict, Verdict), verdict
    assert verdict.holds, "\n".join(verdict.lines())
    assert {finding.step for finding in verdict.findings} == {1, 2, 3}


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize("name", TOLD)
def test_what_is_another_model_is_told(name: str, tmp_path: Path) -> None:
    """By the comparison, or by a refusal."""
    found = compared(SITUATIONS[name], tmp_path, 2, "batch.micro_samples=1")
    said = found.sentence() if isinstance(found, Verdict) else " ".join(found.split())
    assert not (isinstance(found, Verdict) and found.holds)
    assert SITUATIONS[name]["told"] in said


def test_the_table_for_people_has_every_situation() -> None:
    """And no other."""
    page = Path(__file__).parents[2] / "docs" / "own-loop-situations.md"
    rows = [line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("| ")]
    assert sorted(row for row in rows if row != "situation") == sorted(SITUATIONS)
