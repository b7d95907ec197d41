"""When masks change and how many weights they keep: pure functions of the step.

cubic       d(t) = d_end + (1 - d_end) (1 - t)^3,  t from 0 at `begin` to 1 at `end`   arXiv:1710.01878, equation 1
linear      d(t) = d_end + (1 - d_end) (1 - t)
drop        f(t) = drop / 2 (1 + cos(pi t)),       t = step / end                      arXiv:1911.11134, section 3
ERK         d_l ~ (sum of a layer's sizes) / (product of them), at most 1              arXiv:1911.11134, section 3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shoal.sparsity.config import L0, SET, RigL, Sparse

DEFAULT_END = 0.75
"""Of the run's steps, where the schedule names no end (arXiv:1911.11134, section 4)."""


@dataclass(frozen=True)
class MaskPlan:
    """The schedule of a run of `steps` steps, which are counted from 1."""

    config: Sparse
    steps: int

    @property
    def begin(self) -> int:
        return self.config.schedule.begin

    @property
    def end(self) -> int:
        """The last step at which masks change."""
        return max(self.begin, self.config.schedule.end or int(DEFAULT_END * self.steps))

    def due(self, step: int) -> bool:
        """Whether masks change in `step`, beside the first masks of a run that starts sparse."""
        schedule = self.config.schedule
        if isinstance(self.config, L0):
            return step == self.end
        if self.config.starts_sparse:
            changes = self.config.grows or self.config.sends_all
            return changes and self.begin <= step < self.end and step % schedule.every == 0
        if schedule.shape == "one_shot":
            return step == self.begin
        return self.begin <= step <= self.end and ((step - self.begin) % schedule.every == 0 or step == self.end)

    def late(self, step: int) -> bool:
        """Whether masks that are made once are due in `step` where there are none: the step that makes them is over,
        and was skipped.
        """
        if isinstance(self.config, L0):
            return step > self.end
        return not self.config.starts_sparse and self.config.schedule.shape == "one_shot" and step > self.begin

    def density(self, step: int) -> float:
        """The share of weights that is kept after `step`."""
        final, shape = self.config.final_density, self.config.schedule.shape
        if self.config.starts_sparse or (step >= self.begin and shape == "one_shot"):
            return final
        if step < self.begin:
            return 1.0
        left = 1.0 - min(1.0, (step - self.begin) / max(1, self.end - self.begin)) if step < self.end else 0.0
        return final + (1.0 - final) * left ** (3 if shape == "cubic" else 1)

    def moved(self, step: int) -> float:
        """The share of kept weights that a change at `step` drops and grows anew."""
        assert isinstance(self.config, SET | RigL), "no other kind moves weights"
        return self.config.drop / 2 * (1 + math.cos(math.pi * min(1.0, step / self.end)))


def erk(
    shapes: Mapping[str, tuple[int, ...]], density: float, matrices: Mapping[str, int] = MappingProxyType({})
) -> dict[str, float]:
    """The density of each layer of `shapes`, so that all of them together have `density`; `matrices`: of how many such
    shapes a layer is, where that is not one.

    Layers whose share would be above 1 stay dense, and the others have what is left.
    """
    numbers = {name: math.prod(shape) * matrices.get(name, 1) for name, shape in shapes.items()}
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        sparse = [name for name in shapes if name not in dense]
        if not sparse:
            return dict.fromkeys(shapes, 1.0)
        kept = density * sum(numbers.values()) - sum(numbers[name] for name in dense)
        factor = kept / sum(raw[name] * numbers[name] for name in sparse)
        above = {name for name in sparse if factor * raw[name] > 1}
        if not above:
            return {name: 1.0 if name in dense else factor * raw[name] for name in shapes}
        dense |= above
