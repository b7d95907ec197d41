"""The learning rate as a function of the step. Pure: a resumed run asks for its step and gets the same rate."""

from __future__ import annotations

import math

from shoal.optim.config import OptimizerConfig, Schedule


def rate(schedule: Schedule, peak: float, *, step: int, steps: int) -> float:
    """The rate of step `step` (1 is the first) of `steps`.

    Warm-up: peak * step / warmup_steps. Then, with t from 0 at its end to 1 at the last step,
    cosine: final + (peak - final) * (1 + cos(pi t)) / 2 (arXiv:1608.03983, eq. 5); linear: peak + (final - peak) * t.
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    final = peak * schedule.final_fraction
    t = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    if schedule.kind == "cosine":
        return final + (peak - final) * (1 + math.cos(math.pi * t)) / 2
    return peak + (final - peak) * t if schedule.kind == "linear" else peak


def peak_rate(optimizer: OptimizerConfig, *, global_samples: int) -> tuple[float, str | None]:
    """The peak rate, and what the linear scaling rule did to it where it was asked for (arXiv:1706.02677, 2.1)."""
    if optimizer.lr_for_samples is None or optimizer.lr_for_samples == global_samples:
        return optimizer.lr, None
    factor = global_samples / optimizer.lr_for_samples
    scaled = optimizer.lr * factor
    return scaled, (
        f"linear scaling rule: lr {optimizer.lr:g} was tuned for {optimizer.lr_for_samples} samples a step; with "
        f"{global_samples} it is {scaled:g} ({factor:g} times)"
    )
