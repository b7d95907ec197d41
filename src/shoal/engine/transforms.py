"""Gradient transforms: what happens to the agreed gradient before the optimizer sees it.

A transform is a function of the gradient, and transforms compose by standing in a list, as in optax. Those that only
multiply share one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.gradients.gradients import Gradients


@dataclass
class AgreedGradient:
    """The gradient of the global batch. `norm` is its 2-norm; `factor` is what `gradients` have yet to be multiplied by
    (one over the loss scale, to begin with); `step` counts from 1.
    """

    gradients: Gradients
    norm: float
    factor: float = 1.0
    step: int = 1

    def scale(self, factor: float) -> None:
        """Multiplies the gradient."""
        self.factor *= factor
        self.norm *= factor

    def apply(self) -> None:
        """Makes the gradient what it stands for, before the optimizer or a transform reads its numbers."""
        if self.factor != 1.0:
            self.gradients.scale(self.factor)
            self.factor = 1.0


Transform = Callable[[AgreedGradient], None]


@dataclass(frozen=True)
class ClipByGlobalNorm:
    """See `clip_by_global_norm`."""

    limit: float

    def __call__(self, gradient: AgreedGradient) -> None:
        if gradient.norm > self.limit:
            gradient.scale(self.limit / gradient.norm)


def clip_by_global_norm(limit: float) -> ClipByGlobalNorm:
    """Scales a gradient whose 2-norm is above `limit` down to it (Pascanu et al., arXiv:1211.5063, algorithm 1)."""
    return ClipByGlobalNorm(limit)


def by_numbers(change: Callable[[int], None]) -> Transform:
    """One that changes the numbers of each `.grad`, as `shoal.optim.transforms` does; it comes after all that scale."""

    def transform(gradient: AgreedGradient) -> None:
        gradient.apply()
        change(gradient.step)

    return transform
