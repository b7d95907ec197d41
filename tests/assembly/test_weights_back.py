"""A script's own module has the trained weights when `shoal.train` returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs

SCRIPT = """
import shoal, torch
from torch import nn
from shoal.checkpoint.weights import weights_of

class Points:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, int(x[0] > 0)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
before = {name: weight.clone() for name, weight in model.state_dict().items()}
config = {"run": {"name": "own", "steps": 3}, "batch": {"global_samples": 8}, "observe": {"report": False}}
folder = shoal.train(config, ["optimizer.lr=0.1", "layout.shard=2"], model=model, data=Points())
trained = weights_of(folder)
assert all(torch.equal(weight, trained[name]) for name, weight in model.state_dict().items())
assert any(not torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
print("the same weights")
"""


@pytest.mark.slow
def test_a_module_given_to_train_is_trained_when_it_returns(tmp_path: Path) -> None:
    """The ranks train copies; under ZeRO-3, too, the script's own object ends with the checkpoint's weights."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = programs.run(["script.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the same weights" in done.stdout
