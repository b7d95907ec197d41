"""Parameters of unusual kinds: trained, saved, and resumed in another world, or refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.warm_scripts import run_script

SCRIPT = """
import sys
import torch
from torch import nn
import shoal

torch.manual_seed(0)
x = torch.randn(24, 6)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        PARAMETER
    def forward(self, x):
        for block in self.blocks: x = torch.tanh(block(x))
        return x + USE
model = Net()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
tables = {"run": {"name": "mine"}, "checkpoint": {"every_steps": 2}, "gradients": {"bucket_bytes": 65536}}
data = torch.utils.data.TensorDataset(x)
run = shoal.start(tables, model=model, optimizer=optimizer, data=data, batch_samples=6, steps=4)
for (inputs,) in run.batches():
    run.backward((model(inputs) - 1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if LEAVE and run.steps_done == 2: break
if not LEAVE: run.export("weights.safetensors")
run.close()
"""

KINDS = {
    "of no dimension": ("self.p = nn.Parameter(torch.tensor(0.3))", "self.p"),
    "of one element": ("self.p = nn.Parameter(torch.tensor([0.3]))", "self.p"),
    "without elements": ("self.p = nn.Parameter(torch.zeros(0, 4))", "self.p.sum()"),
    "larger than a bucket": ("self.p = nn.Parameter(torch.randn(6, 20_000) / 1e2)", "self.p.sum(1)"),
    "transposed": ("self.p = nn.Parameter(torch.randn(6, 4).t())", "self.p.sum(0)"),
    "two of one storage": (
        "both = torch.randn(12); self.p = nn.Parameter(both[:6]); self.q = nn.Parameter(both[6:])",
        "self.p * self.q",
    ),
    "tied under two names": ("self.blocks[1].bias = self.blocks[0].bias", "0"),
    "in a list of one hundred": (
        "self.p = nn.ParameterList([nn.Parameter(torch.randn(i % 4)) for i in range(100)])",
        "torch.cat(list(self.p)).sum()",
    ),
    "of a subclass": (
        "self.p = nn.Parameter(torch.randn(6)); self.p.__class__ = type('Own', (nn.Parameter,), {})",
        "self.p",
    ),
    "of integers": ("self.p = nn.Parameter(torch.arange(6), requires_grad=False)", "self.p"),
}
REFUSED = {
    "expanded": (
        "self.p = nn.Parameter(torch.randn(1, 6).expand(3, 6))",
        "self.p.sum(0)",
        "the parameter p shows some of its numbers several times",
    ),
    "complex": ("self.p = nn.Parameter(torch.randn(6, dtype=torch.complex64))", "self.p.abs()", "p is complex"),
    "overlapping": (
        "both = torch.randn(8); self.p = nn.Parameter(both[:6]); self.q = nn.Parameter(both[2:])",
        "self.p * self.q",
        "the parameters p and q share some of their numbers",
    ),
}
WEIGHTS = 2e-5
"""Relative to the largest number of a tensor, after four steps of AdamW in float32."""


def script(kind: tuple[str, ...], *, leave: bool = False) -> str:
    return SCRIPT.replace("PARAMETER", kind[0]).replace("USE", kind[1]).replace("LEAVE", str(leave))


@pytest.mark.slow
@pytest.mark.matrix(rows=(0, 2, 5))
@pytest.mark.parametrize("name", KINDS)
def test_it_is_trained_saved_and_resumed_elsewhere(name: str, tmp_path: Path) -> None:
    """Two steps on three ranks under ZeRO-3, two on two under ZeRO-1: the weights of four steps on one rank."""
    plain, divided = tmp_path / "plain", tmp_path / "divided"
    for folder in (plain, divided):
        folder.mkdir()
        (folder / "mine.py").write_text(script(KINDS[name]))
    assert run_script(plain / "mine.py", plain) == [0], (plain / "rank-0.txt").read_text()
    (divided / "leaving.py").write_text(script(KINDS[name], leave=True))
    for file, world, zero in (("leaving.py", 3, 3), ("mine.py", 2, 1)):
        keys = (f"layout.shard={world}", f"memory.zero={zero}")
        codes = run_script(divided / file, divided, *keys, world=world)
        assert codes == [0] * world, (divided / "rank-0.txt").read_text()
    assert "resumed" in (divided / "rank-0.txt").read_text()
    found, wanted = (load_file(folder / "weights.safetensors") for folder in (divided, plain))
    assert found.keys() == wanted.keys()
    for key in wanted:
        scale = float(wanted[key].abs().max()) if wanted[key].numel() else 1.0
        assert float((found[key] - wanted[key]).abs().float().sum()) < WEIGHTS * scale * max(1, wanted[key].numel()), (
            key
        )


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    *kind, sentence = REFUSED[name]
    (tmp_path / "mine.py").write_text(script(tuple(kind)))
    assert run_script(tmp_path / "mine.py", tmp_path) == [2]
    said = " ".join((tmp_path / "rank-0.txt").read_text().split())
    assert sentence in said


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Not after the last, when the training is lost."""
    kept = (
        "class Kept:\n    def state_dict(self): return {'seen': {1, 2}}\n    def load_state_dict(self, state): pass\n"
    )
    text = script(KINDS["of one element"]).replace("steps=4)", "steps=4, state={'kept': Kept()})")
    (tmp_path / "mine.py").write_text(kept + text)
    assert run_script(tmp_path / "mine.py", tmp_path) == [2]
    said = (tmp_path / "rank-0.txt").read_text()
    assert "extra/kept/seen is a set; a checkpoint holds" in " ".join(said.split())
    assert "step 1/4" not in said
