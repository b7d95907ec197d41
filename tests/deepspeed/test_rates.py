"""Schedules of a JSON file have the rates that DeepSpeed gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.deepspeed.rates import Schedule, schedule_of
from shoal.errors import UsageError

UPDATES = 8


def schedule(kind: str, lr: float = 0.1, groups: int = 1, **params: Any) -> Schedule:
    tensors = [torch.nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    optimizer = torch.optim.SGD([{"params": [each], "lr": lr} for each in tensors], lr=lr)
    return schedule_of({"type": kind, "params": params}, optimizer)


def rates(found: Schedule) -> list[float]:
    """That of the first group in each update."""
    seen = []
    for _ in range(UPDATES):
        seen.append(found.optimizer.param_groups[0]["lr"])
        found.step()
    return seen


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        # DeepSpeed 0.19.8: the rates of eight updates, the schedule stepped behind each
        ("WarmupLR", {"warmup_num_steps": 4}, [0, 0, 0.05, 0.0792481250, 0.1, 0.1, 0.1, 0.1]),
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1]),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_max_lr": 0.1, "warmup_min_lr": 0.01},
            [0.01, 0.01, 0.1, 0.1, 0.0775, 0.055, 0.0325, 0.01],
        ),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 2, "total_num_steps": 6, "cos_min_ratio": 0.1},
            [0, 0, 0.1, 0.0868198052, 0.055, 0.0231801948, 0.01, 0.01],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
            [0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045],
        ),
        (
            "LRRangeTest",
            {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
            [0.01, 0.01, 0.02, 0.02, 0.03, 0.03, 0.04, 0.04],
        ),
    ],
)
def test_rates_of_the_first_updates(kind: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(schedule(kind, **params)) == pytest.approx(expected, abs=1e-9)


def test_a_list_has_a_rate_for_each_group() -> None:
    found = schedule("WarmupLR", groups=2, warmup_min_lr=[0.0, 0.5], warmup_max_lr=[1.0, 2.0], warmup_num_steps=2)
    found.step()
    found.step()
    assert found.get_lr() == [1.0, 2.0]
    assert [group["lr"] for group in found.optimizer.param_groups] == [1.0, 2.0]


def test_a_restored_schedule_goes_on() -> None:
    params = {"warmup_num_steps": 3, "total_num_steps": 9}
    whole, cut, other = (schedule("WarmupDecayLR", **params) for _ in range(3))
    expected = rates(whole)
    for _ in range(3):
        cut.step()
    other.load_state_dict(cut.state_dict())
    assert rates(other)[: UPDATES - 3] == expected[3:]


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("WarmupLr", {}, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, "did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "a whole number above 0"),
        ("WarmupLR", {"warmup_type": "cosine"}, "log or linear"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "it is a number"),
        ("WarmupLR", {"warmup_min_lr": [0, 0]}, "2 numbers for 1 groups"),
        ("WarmupDecayLR", {}, "needs total_num_steps"),
        ("OneCycle", {}, "torch.optim.lr_scheduler.OneCycleLR"),
    ],
)
def test_what_is_wrong_is_said(kind: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        schedule(kind, **params)
