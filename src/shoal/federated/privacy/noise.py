"""Where noise comes from: the entropy of the operating system, or in a simulation the run's seed.

    z = sqrt(-2 ln u) cos(2 pi v),   u and v uniform (Box and Muller 1958)

Only the first hides anything. Numbers are float64, rounded to the model's type after the sum; an attack by the rounding
of floating-point noise (Mironov, CCS 2012) is not ruled out, as it would be by discrete noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shoal.maths.counter import key_of, normal

Noise = Callable[[int], Tensor]
"""So many standard normal numbers, float64."""


def from_entropy(numel: int) -> Tensor:
    """From `os.urandom`: 53 bits for each uniform number."""
    words = np.frombuffer(os.urandom(16 * numel), dtype=np.uint64).reshape(2, numel)
    u, v = (torch.from_numpy(((row >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53) for row in words)
    return (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()


class Simulated:
    """The same numbers in every simulation of a run: draw after draw from the run's seed."""

    def __init__(self, seed: int, *names: str | int) -> None:
        self._seed, self._names, self._draw = seed, names, 0

    def __call__(self, numel: int) -> Tensor:
        self._draw += 1
        key = key_of(self._seed, "privacy", *self._names, self._draw)
        return normal(key, torch.arange(numel), dtype=torch.float64)
