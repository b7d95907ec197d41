"""The learning rate as a function of the step. Pure: a resumed run asks for its step and gets the same rate.

Warm-up: peak * step / warmup_steps. Then, with s steps since its end, t = s / (steps - warmup_steps) from 0 to 1, and
f = final_fraction, the rate is the peak times

    cosine         f + (1 - f) (1 + cos(pi t)) / 2                                          arXiv:1608.03983, eq. 5
    linear         1 - (1 - f) t
    polynomial     f + (1 - f) (1 - t)^power
    constant       1
    stable         1, then linear to f over the last `decay_fraction` of the steps          arXiv:2404.06395, 4.2
    step           factor^(the milestones that are passed)
    inverse_sqrt   sqrt(w / (w + s)),  w = max(1, warmup_steps)                             arXiv:1706.03762, eq. 3
    one_cycle      half a cosine up from `initial_fraction`, in the place of the warm-up, and half a one down to f
                                                                                            arXiv:1708.07120
    chained        `phases`, each from where the last one ends
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping

from shoal.optim.config import OptimizerConfig, Schedule


def rate(schedule: Schedule, peak: float, *, step: int, steps: int) -> float:
    """The rate of step `step` (1 is the first) of `steps`."""
    warmup = schedule.warmup_steps
    if schedule.kind == "one_cycle" and step < warmup:
        return peak * _between("cosine", schedule.initial_fraction, 1.0, step / warmup)
    if step <= warmup:
        return peak * step / warmup
    return peak * _SHARES[schedule.kind](schedule, step - warmup, max(1, steps - warmup))


def _between(kind: str, first: float, last: float, t: float) -> float:
    """From `first` at t = 0 to `last` at t = 1 and beyond."""
    t = min(1.0, t)
    return first + (last - first) * ((1 - math.cos(math.pi * t)) / 2 if kind == "cosine" else t)


def _cosine(schedule: Schedule, since: int, of: int) -> float:
    return _between("cosine", 1.0, schedule.final_fraction, since / of)


def _linear(schedule: Schedule, since: int, of: int) -> float:
    return _between("linear", 1.0, schedule.final_fraction, since / of)


def _constant(schedule: Schedule, since: int, of: int) -> float:
    return 1.0


def _stable(schedule: Schedule, since: int, of: int) -> float:
    share = schedule.decay_fraction
    return _between("linear", 1.0, schedule.final_fraction, max(0.0, (since / of - (1 - share)) / share))


def _polynomial(schedule: Schedule, since: int, of: int) -> float:
    final = schedule.final_fraction
    return final + (1 - final) * (1 - min(1.0, since / of)) ** schedule.power


def _step(schedule: Schedule, since: int, of: int) -> float:
    return schedule.factor ** bisect_left(schedule.milestones, since + schedule.warmup_steps)


def _inverse_sqrt(schedule: Schedule, since: int, of: int) -> float:
    first = max(1, schedule.warmup_steps)
    return math.sqrt(first / (first + since))


def _chained(schedule: Schedule, since: int, of: int) -> float:
    begins, level = 0, 1.0
    for phase in schedule.phases:
        length = max(1, of - begins) if phase.steps is None else phase.steps
        final = level if phase.final_fraction is None else phase.final_fraction
        if phase.steps is None or since <= begins + length:
            return _between(phase.kind, level, final, (since - begins) / length)
        begins, level = begins + length, final
    return level


_SHARES: Mapping[str, Callable[[Schedule, int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "stable": _stable,
    "polynomial": _polynomial,
    "step": _step,
    "inverse_sqrt": _inverse_sqrt,
    "one_cycle": _cosine,
    "chained": _chained,
}


def peak_rate(optimizer: OptimizerConfig, *, global_samples: int) -> tuple[float, str | None]:
    """The peak rate, and what the scaling rule did to it where it was asked for: linear (arXiv:1706.02677, 2.1), or by
    the square root, which keeps the noise of an adaptive optimizer's update (arXiv:1404.5997; arXiv:2205.10287).
    """
    if optimizer.lr_for_samples is None or optimizer.lr_for_samples == global_samples:
        return optimizer.lr, None
    by_root = optimizer.lr_scaling == "square_root"
    factor = (global_samples / optimizer.lr_for_samples) ** (0.5 if by_root else 1.0)
    scaled = optimizer.lr * factor
    return scaled, (
        f"{'square root' if by_root else 'linear'} scaling rule: lr {optimizer.lr:g} was tuned for "
        f"{optimizer.lr_for_samples} samples a step; with {global_samples} it is {scaled:g} ({factor:g} times)"
    )
