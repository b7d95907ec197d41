"""What one rank alone computed, before anything is summed: its squared norm, taken from buckets as they leave.

Noise is what parts of a batch disagree in. A rank's first microbatch is such a part; behind a pipeline's schedule,
where microbatches are not told apart, all of the rank's samples are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OwnGradient:
    """Adds up squared norms while it is open: in a step in which it is wanted, until the first part is over."""

    def __init__(self) -> None:
        self.wanted = False
        self._open = False
        self._squares: list[Tensor] = []

    @property
    def open(self) -> bool:
        """Whether norms are still being taken."""
        return self._open

    def start(self) -> None:
        """A step begins."""
        self._open = self.wanted
        self._squares = []

    def add(self, norms: Iterable[Tensor]) -> None:
        """2-norms, scalars, of gradients that this rank counts."""
        if self._open:
            self._squares += [norm.double().square() for norm in norms]

    def close(self) -> None:
        """The first part is over: what comes is not added."""
        self._open = False

    def square(self, device: torch.device) -> Tensor:
        """The sum, a float64 scalar; 0 where this rank counts nothing or nothing was wanted."""
        if not self._squares:
            return torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([square.to(device) for square in self._squares]).sum()
