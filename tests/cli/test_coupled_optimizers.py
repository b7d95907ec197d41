"""Optimizers that are not PyTorch's in a script's own loop: the update of one process, or a sentence before step 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.warm_scripts import run_script

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
import shoal
from tests.optim.coupled_optimizers import Distance, OwnNorm, Stacks

torch.manual_seed(0)
x = torch.randn(48, 6)
y = (x.sum(1, keepdim=True) > 0).float()
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
optimizer = KIND(model.parameters(), lr=RATE)
data = torch.utils.data.TensorDataset(x, y)
run = shoal.start(model=model, optimizer=optimizer, data=data, batch_samples=12, steps=6)
for x, y in run.batches():
    run.backward(F.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
run.export("weights.safetensors")
run.close()
"""


def ran(folder: Path, kind: str, *overrides: str, world: int = 1) -> tuple[list[int], str]:
    """Exit codes, and what rank 0 said."""
    folder.mkdir()
    (folder / "mine.py").write_text(
        SCRIPT.replace("KIND", kind).replace("RATE", "1.0" if kind == "Distance" else "0.1")
    )
    codes = run_script(folder / "mine.py", folder, *overrides, world=world)
    return codes, (folder / "rank-0.txt").read_text()


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(("world", "stage"), [(2, 3), (2, 1), (3, 1), (2, 2), (3, 3)])
def test_one_that_needs_all_gradients_is_refused_where_they_are_divided(tmp_path: Path, world: int, stage: int) -> None:
    """With what to set instead, and before the first step; not another model, and no crash in its code."""
    codes, said = ran(tmp_path / "run", "Distance", f"layout.shard={world}", f"memory.zero={stage}", world=world)
    assert codes == [2] * world
    assert "Distance computes its step from the gradients of all parameters together" in said
    assert f"set layout.shard to 1 and layout.replicate to {world}" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.matrix(rows=(0, 3))
@pytest.mark.parametrize(
    ("kind", "world", "overrides"),
    [
        ("Distance", 2, ()),
        ("Distance", 3, ("batch.micro_samples=2",)),
        ("Stacks", 3, ("layout.shard=3", "memory.zero=1")),
        ("Stacks", 3, ("layout.shard=3", "memory.zero=3")),
        ("Stacks", 2, ("layout.shard=2", "memory.zero=2", "batch.micro_samples=3")),
        ("OwnNorm", 2, ("layout.shard=2", "memory.zero=3", "batch.micro_samples=2")),
    ],
)
def test_the_others_compute_what_they_do_in_one_process(
    tmp_path: Path, kind: str, world: int, overrides: tuple[str, ...]
) -> None:
    """Also on a rank that owns no parameter: two of three parameters are tiny, and three ranks share them."""
    codes, said = ran(tmp_path / "one", kind)
    assert codes == [0], said
    codes, said = ran(tmp_path / "several", kind, *overrides, world=world)
    assert codes == [0] * world, said
    one, several = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "several"))
    for name, weight in one.items():
        assert several[name].numpy() == pytest.approx(weight.numpy(), rel=1e-5, abs=1e-6), name


@pytest.mark.stress
def test_a_resumed_run_goes_on_with_the_numbers_of_its_groups(tmp_path: Path) -> None:
    """Killed after the checkpoint of step 3: the distance that the optimizer has estimated is not begun again."""
    codes, said = ran(tmp_path / "whole", "Distance", world=2)
    assert codes == [0, 0], said
    codes, _ = ran(tmp_path / "run", "Distance", "checkpoint.every_steps=3", "run.steps=3", world=2)
    assert codes == [0, 0]
    codes = run_script(tmp_path / "run/mine.py", tmp_path / "run", "checkpoint.every_steps=3", world=2)
    assert codes == [0, 0], (tmp_path / "run/rank-0.txt").read_text()
    whole, resumed = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "run"))
    for name, weight in whole.items():
        assert resumed[name].numpy() == pytest.approx(weight.numpy(), rel=1e-6, abs=1e-7), name
