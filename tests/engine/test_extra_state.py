"""State of a script's own objects in a checkpoint: PyTorch's schedulers go on as if nothing had happened."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as s

from shoal.engine.extra_state import ExtraSection
from shoal.errors import UserCodeError

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: s.StepLR(o, 2),
    "MultiStepLR": lambda o: s.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lambda o: s.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: s.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: s.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: s.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: s.PolynomialLR(o, 8),
    "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, 2),
    "CyclicLR of range": lambda o: s.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: s.OneCycleLR(o, 0.1, 9),
    "LambdaLR": lambda o: s.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: s.MultiplicativeLR(o, lambda step: 0.9),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=5),
}


def advance(scheduler: Any, optimizer: torch.optim.Optimizer, number: int) -> list[float]:
    rates = []
    for _ in range(number):
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, s.ReduceLROnPlateau) else scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_a_checkpoint(name: str) -> None:
    """Three steps, a checkpoint as JSON and tensors, a new process's scheduler: then the same rates as without it."""
    make = SCHEDULERS[name]
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    advance(scheduler, optimizer, 3)
    saved = ExtraSection({"scheduler": scheduler})
    facts, tensors = json.loads(json.dumps(saved.facts(), allow_nan=False)), saved.tensors()
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    expected = advance(scheduler, optimizer, 4)

    again = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    resumed = make(again)
    section = ExtraSection({"scheduler": resumed})
    targets = section.targets({name: tensor.dtype for name, tensor in tensors.items()})  # pyright: ignore
    for name, target in targets.items():
        target.copy_(tensors[name])  # pyright: ignore
    section.load(facts)
    section.restore()
    for group, values in zip(again.param_groups, groups, strict=True):
        group.update(values)
    assert advance(resumed, again, 4) == pytest.approx(expected)


def test_every_scheduler_of_torch_is_tried() -> None:
    abstract = {"LRScheduler"}
    there = {name for name in s.__all__ if isinstance(getattr(s, name), type)} - abstract
    assert there <= {name.split()[0] for name in SCHEDULERS}


def test_what_a_checkpoint_cannot_hold_is_named() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(UserCodeError, match="extra/odd/file is a object"):
        ExtraSection({"odd": Odd()}).facts()
