"""The schedules of DeepSpeed's JSON file, as functions of the number of updates.

The rate of update n, from 0, is that of iteration i = n - 1: DeepSpeed moves a schedule behind each update, and begins
one before its iteration 0. With w the updates of the warm-up, T those of all, and a warm-up

    g(i) = log(i + 1) / log(w)   ("log", the default)    or    i / w   ("linear"),       i < w

    WarmupLR         min + (max - min) g(i),  then max
    WarmupDecayLR    the same, then min + (max - min) (T - i) / (T - w), down to min
    WarmupCosineLR   lr (r + (1 - r) g(i)),  then  lr (c + (1 - c) (1 + cos(pi (i - w + 1) / (T - w))) / 2)
    LRRangeTest      min (1 + rate i / size), or that of the last whole `size` where it is a staircase
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.deepspeed.config import near
from shoal.errors import UsageError

Rate = Callable[[int], float]
"""The rate of an iteration, -1 being that before the first."""


class Schedule:
    """Sets the rates of the groups of `optimizer`, each by its own function, as schedulers of PyTorch do."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Sequence[Rate]) -> None:
        self.optimizer, self._rates = optimizer, rates
        self.last_batch_iteration = -1
        self._set()

    def step(self) -> None:
        """Behind an update."""
        self.last_batch_iteration += 1
        self._set()

    def get_lr(self) -> list[float]:
        """The rate of each group for the next update."""
        return [rate(self.last_batch_iteration) for rate in self._rates]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


def schedule_of(table: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Schedule:
    """That of the JSON file's `scheduler`: {"type": ..., "params": {...}}. Raises `UsageError` for what it may not
    say.
    """
    kind, given = table.get("type"), dict(table.get("params") or {})
    if kind == "OneCycle":
        raise UsageError("scheduler.type OneCycle: hand lr_scheduler=torch.optim.lr_scheduler.OneCycleLR(...) over")
    if kind not in KINDS:
        raise UsageError(f"scheduler.type: found {kind!r}; known are {', '.join(KINDS)}{near(kind, KINDS)}")
    build, names = KINDS[kind]
    if unknown := [name for name in given if name not in names]:
        raise UsageError(f"scheduler.params: {kind} has no {unknown[0]!r}{near(unknown[0], names)}; it has {names}")
    for name, value in given.items():
        if name in ("warmup_type", "lr_range_test_staircase"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | list):
            raise UsageError(f"scheduler.params.{name}: found {value!r}; it is a number")
    if "total_num_steps" in names and "total_num_steps" not in given:
        raise UsageError(f"scheduler.params: {kind} needs total_num_steps, the updates of the whole run")
    groups = optimizer.param_groups
    if kind == "WarmupLR" and given.get("warmup_max_lr") is None:
        given["warmup_max_lr"] = groups[0]["lr"]  # of all groups
    return Schedule(optimizer, [build(_of_group(given, n, len(groups)), group["lr"]) for n, group in enumerate(groups)])


def _of_group(given: Mapping[str, Any], number: int, groups: int) -> dict[str, Any]:
    """The parameters for one of so many groups: a list has one for each."""
    for name, value in given.items():
        if isinstance(value, list) and len(value) != groups:
            raise UsageError(f"scheduler.params.{name}: found {len(value)} numbers for {groups} groups of parameters")
    return {name: value[number] if isinstance(value, list) else value for name, value in given.items()}


def _warmup(given: Mapping[str, Any]) -> tuple[int, Rate]:
    """How long it is, and what of the way up is made in it."""
    steps, kind = given.get("warmup_num_steps", 1000), given.get("warmup_type", "log")
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"scheduler.params.warmup_num_steps: found {steps!r}; it is a whole number above 0")
    if kind not in ("log", "linear"):
        raise UsageError(f"scheduler.params.warmup_type: found {kind!r}; it is log or linear")
    steps = max(2, steps)
    return steps, lambda i: math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def _warmup_lr(given: Mapping[str, Any], lr: float) -> Rate:
    low, high = given.get("warmup_min_lr", 0.0), given["warmup_max_lr"]
    warmup, share = _warmup(given)
    return lambda i: low if i < 0 else low + (high - low) * (share(i) if i < warmup else 1.0)


def _warmup_decay_lr(given: Mapping[str, Any], lr: float) -> Rate:
    low, high, total = given.get("warmup_min_lr", 0.0), given.get("warmup_max_lr", 0.001), given["total_num_steps"]
    warmup, share = _warmup(given)

    def rate(i: int) -> float:
        if i < 0:
            return low
        left = share(i) if i < warmup else max(0.0, (total - i) / max(1.0, total - warmup))
        return low + (high - low) * left

    return rate


def _warmup_cosine_lr(given: Mapping[str, Any], lr: float) -> Rate:
    first, last, total = given.get("warmup_min_ratio", 0.0), given.get("cos_min_ratio", 1e-4), given["total_num_steps"]
    warmup, share = _warmup(given)

    def ratio(i: int) -> float:
        if i < warmup:
            return first + (1 - first) * share(i)
        down = (1 + math.cos(math.pi * min(1.0, (i - warmup + 1) / max(1, total - warmup)))) / 2
        return max(0.0, last + (1 - last) * down)

    return lambda i: 0.0 if i < 0 else lr * ratio(i)


def _range_test(given: Mapping[str, Any], lr: float) -> Rate:
    low, rate = given.get("lr_range_test_min_lr", 1e-3), given.get("lr_range_test_step_rate", 1.0)
    size = given.get("lr_range_test_step_size", 2000)
    whole = math.floor if given.get("lr_range_test_staircase", False) else float
    return lambda i: low * (1 + rate * whole((i + 1) / size))


_WARMUP = ("warmup_num_steps", "warmup_type")
KINDS: dict[str, tuple[Callable[[Mapping[str, Any], float], Rate], tuple[str, ...]]] = {
    "WarmupLR": (_warmup_lr, ("warmup_min_lr", "warmup_max_lr", *_WARMUP)),
    "WarmupDecayLR": (_warmup_decay_lr, ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_WARMUP)),
    "WarmupCosineLR": (_warmup_cosine_lr, ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP)),
    "LRRangeTest": (
        _range_test,
        (
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
        ),
    ),
}
"""The schedules, and the parameters of each."""
