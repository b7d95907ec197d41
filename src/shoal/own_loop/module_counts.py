"""Python numbers that a model counts by itself, such as `self.num_iter += 1` in its forward.

A weight that is annealed by such a number goes by microbatches, of which a step has as many as its layout needs, and no
checkpoint has it. A buffer that a forward changes is changed once a step, whatever the layout, and saved
(`shoal.engine.batch_statistics`). Nothing is changed here: the first step of several microbatches is watched, and the
loop is warned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

Numbers = Mapping[tuple[str, str], float]
"""By the name of a module and of its attribute."""


class ModuleCounts:
    """Watches the numbers of `model` over two microbatches: `look` before each, and once behind the second."""

    LOOKS = 3

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._seen: list[Numbers] = []

    @property
    def is_over(self) -> bool:
        """Has it looked as often as it does?"""
        return len(self._seen) == self.LOOKS

    def look(self) -> str | None:
        """What has been counted, in a sentence, if this is the last look."""
        self._seen.append(_numbers_of(self._modules))
        if not self.is_over:
            return None
        for (name, attribute), last in self._seen[-1].items():
            default = getattr(type(self._modules[name]), attribute, None)  # `num_iter = 0` of a class
            first, second = (numbers.get((name, attribute), default) for numbers in self._seen[:-1])
            if isinstance(first, (int, float)) and isinstance(second, (int, float)) and is_count(first, second, last):
                return _sentence(f"{name}.{attribute}".lstrip("."), attribute, last)
        return None


def is_count(first: float, second: float, third: float) -> bool:
    """Do they grow by the same number, or shrink by the same factor, as what is counted or annealed does?"""
    if first == second or second == third:
        return False
    by_factor = first != 0 and second != 0 and math.isclose(second / first, third / second, rel_tol=1e-9)
    return by_factor or math.isclose(second - first, third - second, rel_tol=1e-9)


def _numbers_of(modules: Mapping[str, nn.Module]) -> Numbers:
    return {
        (name, attribute): value
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if type(value) in (int, float)
    }


def _sentence(what: str, attribute: str, value: float) -> str:
    return (
        f"the model counts microbatches in {what}, {value:g} by now: a step has as many as its layout needs, so what "
        "follows from it depends on the number of ranks, and a resumed run counts from the start. A buffer is counted "
        f'once a step, and saved: self.register_buffer("{attribute}", torch.tensor({type(value)(0)!r}))'
    )
