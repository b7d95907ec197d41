"""Is what a layout computed what one process computes? Comparisons with tolerances, pure functions of tensors.

A gradient that is zero in exact arithmetic holds noise only, for which a relative error means nothing. So a tensor of
n of the model's N numbers is compared on the scale of the larger of its own norm and its share of the whole gradient
g:

    |a - b| <= tolerance * max(|b|, 1e-3 |g| sqrt(n / N))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shoal.topology.holding import Box

Quantity = Literal["loss", "norm", "gradient", "weight", "agreement", "buffer", "rate", "route", "neighbours", "moment"]


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences. `noise_share`: below this share of its due part of the whole gradient, a tensor's
    gradient is taken for noise. `cancelled`: the most that measured rounding excuses in a gradient that is more.
    """

    loss: float
    norm: float
    gradient: float
    weight: float
    noise_share: float = 1e-3
    cancelled: float = 0.0


SINGLE = Tolerances(loss=1e-5, norm=1e-5, gradient=1e-5, weight=1e-6, cancelled=2e-4)
EXACT = Tolerances(loss=1e-12, norm=1e-12, gradient=1e-12, weight=1e-12, cancelled=2e-11)
HALF = Tolerances(loss=2**-8, norm=2**-5, gradient=2**-3, weight=2**-7, noise_share=0.3)
"""Under autocast each product is rounded to 8 bits (bfloat16), otherwise in each layout: errors of a rounding in the
loss, and of many in a gradient. What is wrong by a factor, or left out, is larger."""
MASTERS = replace(HALF, weight=SINGLE.weight)
"""Gradients are as under autocast; masters are float32, and the one process takes the same gradients."""

RATE_TOLERANCE = 1e-12
ROUNDINGS = 64.0
"""Times the rounding that one other order shows: sums inside a kernel keep theirs, and few numbers show less by luck.
"""
CANCELLED_ROUNDINGS = 16.0
"""The same for a gradient that is no noise: a small convolutional net with batch norms showed 6 of them at most."""


class HeldBox(NamedTuple):
    """A box of a tensor of the unsplit model, as rank `rank` has it."""

    name: str
    rank: int
    box: Box
    values: Tensor


@dataclass(frozen=True)
class Finding:
    """One comparison. `difference` is relative, on the scale that the tolerance is meant for; `rank` -1: all."""

    step: int
    quantity: Quantity
    name: str
    rank: int
    difference: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Within the tolerance; a difference that is not a number is not."""
        return self.difference <= self.tolerance


def compare_number(step: int, quantity: Quantity, found: float, wanted: float, *, tolerance: float) -> Finding:
    """A loss or a norm."""
    scale = max(abs(wanted), torch.finfo(torch.float64).tiny)
    return Finding(step, quantity, quantity, -1, abs(found - wanted) / scale, tolerance)


def compare_gradients(
    step: int,
    parts: Iterable[HeldBox],
    wanted: dict[str, Tensor],
    *,
    tolerances: Tolerances,
    rounding: Callable[[], Mapping[str, float]] = dict,
) -> list[Finding]:
    """Every rank's boxes of every gradient beside the reference's.

    A gradient that is zero in exact arithmetic (a bias in front of a norm) is the rounding of sums that cancel, which
    may be more than the tolerance. One of which a part cancels (a bias with a ReLU between it and a norm over few
    samples) is less accurate than its type, in one process, too. `rounding` says how much the order of summation
    changes in each gradient; it is asked only where one differs, and excuses no more than `tolerances.cancelled` of a
    gradient above the noise share.
    """
    numbers = sum(gradient.numel() for gradient in wanted.values())
    whole = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in wanted.values()))
    own = {name: float(gradient.double().norm()) for name, gradient in wanted.items()}

    def scale(name: str) -> float:
        return max(own[name], tolerances.noise_share * whole * math.sqrt(wanted[name].numel() / numbers))

    found = [_compared(step, "gradient", part, wanted, scale(part.name), tolerances.gradient) for part in parts]
    if all(finding.holds or _is_beyond(finding, own, scale, tolerances) for finding in found):
        return found
    noise = rounding()

    def allowed(finding: Finding) -> float:
        measured = noise.get(finding.name, 0.0) / scale(finding.name)
        if own[finding.name] == scale(finding.name):
            return max(finding.tolerance, min(tolerances.cancelled, CANCELLED_ROUNDINGS * measured))
        return max(finding.tolerance, ROUNDINGS * measured)

    return [replace(finding, tolerance=allowed(finding)) for finding in found]


def _is_beyond(
    finding: Finding, own: Mapping[str, float], scale: Callable[[str], float], tolerances: Tolerances
) -> bool:
    """Whether no rounding could excuse it: more of a gradient above the noise share than `tolerances.cancelled`."""
    return own[finding.name] == scale(finding.name) and not finding.difference <= tolerances.cancelled


def compare_weights(
    step: int, parts: Iterable[HeldBox], wanted: dict[str, Tensor], *, tolerance: float, quantity: Quantity = "weight"
) -> list[Finding]:
    """Every rank's boxes of every parameter, or buffer, after the step beside the reference's."""
    scales = {name: float(weight.double().norm()) for name, weight in wanted.items()}
    return [_compared(step, quantity, part, wanted, scales[part.name], tolerance) for part in parts]


def compare_rates(rates: Iterable[Sequence[float]], wanted: Mapping[int, float]) -> list[Finding]:
    """Every rank's learning rates at the steps of `wanted`, in its order, beside those that the schedule asks for."""
    return [
        Finding(step, "rate", f"of step {step}", rank, abs(found - lr) / max(abs(lr), 1e-300), RATE_TOLERANCE)
        for rank, own in enumerate(rates)
        for (step, lr), found in zip(wanted.items(), own, strict=True)
    ]


def assembled(parts: Iterable[HeldBox], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors out of the ranks' boxes. Raises `ValueError` for one of which a number is missing."""
    whole = {name: torch.full_like(tensor, math.nan) for name, tensor in like.items()}
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in like.items()}
    for part in parts:
        whole[part.name][part.box.slices] = part.values.to(whole[part.name])
        covered[part.name][part.box.slices] = True
    for name, mask in covered.items():
        if not bool(mask.all()):
            missing = int((~mask).sum())
            raise ValueError(f"no rank owns all of {name}: {missing} of its {mask.numel()} numbers are missing")
    return whole


def _compared(
    step: int, quantity: Quantity, part: HeldBox, wanted: dict[str, Tensor], scale: float, tolerance: float
) -> Finding:
    """The difference of one box, on the scale of its whole tensor: a box may hold zeros only."""
    gap = float((part.values.double() - wanted[part.name][part.box.slices].cpu().double()).norm())
    difference = gap / scale if scale > 0 else (0.0 if gap == 0 else math.inf)
    return Finding(step, quantity, part.name, part.rank, math.inf if math.isnan(difference) else difference, tolerance)
