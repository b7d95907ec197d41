"""What a user's module draws that no sample's key decides, and how that is said.

`shoal.models.keyed_draws` keys dropout and the common random functions on the sample, so that no layout changes them.
Functions that it cannot key, and all of them under `run.compile`, draw from PyTorch's generator: each replica draws
numbers of its own, and another layout others.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.assembly.run import Run
from shoal.models.config import ForeignModel

COMPILED = (
    "the model draws random numbers, and under run.compile = true no sample's key decides them: what it draws depends "
    "on the layout; with run.compile = false dropout and the common random functions do not"
)
UNKEYED = (
    "the model calls {}, which draws from PyTorch's generator and knows no samples: what it draws depends on the "
    "layout. Draw by torch.rand, torch.randn or dropout instead, or in the data, where results must not depend on it"
)


def said_of(names: Iterable[str], *, compiled: bool | str) -> str:
    """One sentence about the functions `names`; "" where there are none."""
    called = sorted(names)
    if not called:
        return ""
    return COMPILED if compiled else UNKEYED.format(" and ".join(called))


class UnkeyedDraws:
    """Says once of each function that this rank's part of the model calls it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._said: frozenset[str] = frozenset()
        self._ask = isinstance(run.run_file.model, ForeignModel)

    def news(self) -> str:
        """After a step: a sentence about what it was the first to draw; "" where there is none."""
        if not self._ask:
            return ""
        compiled = self._run.run_file.run.compile
        randomness = self._run.generation.forward_backward.compute.randomness
        found = randomness.unkeyed(self._run.device) - self._said
        self._said |= found
        self._ask = not compiled  # its forwards are alike, and reading the generator costs more than a set
        return said_of(found, compiled=compiled)
