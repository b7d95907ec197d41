"""An update that is launched before its vote is known does what one does that waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import TensorDataset

from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.config.named import GIVEN
from shoal.engine.transforms import clip_by_global_norm
from shoal.engine.updates import AtOnce
from shoal.launcher.environment import Place
from shoal.runfile.run_file import RunFile

ROUNDING = 1e-6
"""Float32: the kernel divides where the other multiplies."""
STEPS, POISONED = 5, 3


class Net(nn.Module):
    """A batch norm counts what it has seen, as a step that is skipped must not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.inner(x)))


def run_file(folder: Path, precision: str, clip_norm: float | None) -> RunFile:
    given = {"kind": "python", "build": GIVEN}
    return msgspec.convert(
        {
            "run": {"name": "vote", "steps": STEPS, "directory": str(folder), "processes": 1, "device": "cpu"},
            "model": given,
            "data": given,
            "loss": given,
            "batch": {"global_samples": 4},
            "optimizer": {"kind": "adamw", "lr": 1e-2, "clip_norm": clip_norm},
            "precision": {"kind": precision},
        },
        RunFile,
    )


def trained(folder: Path, *, ahead: bool, precision: str, clip_norm: float | None) -> tuple[list[Any], dict[str, Any]]:
    """Loss, norm, outcome and scale of each step, and the state at the end. One step's loss is not finite."""
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.float(), targets, reduction="none")
        return losses * float("nan") if calls == POISONED else losses

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    place = Place(0, 1, 0, 1, 0, "shoal")
    objects = UserObjects(model=Net(), data=data, loss=loss)
    run = open_run(run_file(folder, precision, clip_norm), place, objects, store=HashStore())
    transforms = [] if clip_norm is None else [clip_by_global_norm(clip_norm)]
    optimizer = run.state.optimizer.optimizer
    run.step.policy = AtOnce(run.generation.gradients, optimizer, transforms=transforms, votes_ahead=ahead)
    found = []
    with run.feed() as feed:
        for calls in range(1, STEPS + 1):
            done = run.step(calls, feed.next().microbatches, lr=1e-2)
            found.append((done.loss, done.norm, done.committed, done.scale))
    return found, {name: held for name, held in run.state.tensors().items() if isinstance(held, Tensor)}


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 0.1, 1e6])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_both_make_the_same_updates(tmp_path: Path, precision: str, clip_norm: float | None) -> None:
    """Clipped or not, under a loss scale or not; a step that is not finite changes nothing in either."""
    (waits, state), (ahead, other) = (
        trained(tmp_path, ahead=ahead, precision=precision, clip_norm=clip_norm) for ahead in (False, True)
    )
    assert [done[2] for done in ahead] == [number != POISONED for number in range(1, STEPS + 1)]
    for one, two in zip(waits, ahead, strict=True):
        assert two == pytest.approx(one, rel=10 * ROUNDING, nan_ok=True)
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(other[name], tensor, rtol=10 * ROUNDING, atol=ROUNDING)
