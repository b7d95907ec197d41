"""The laws that first values of parameters follow: each maps counters to numbers, so that any part is drawn alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.maths.counter import normal


class Law(Protocol):
    """A distribution of first values."""

    def draw(self, key: int, counters: Tensor, *, dtype: torch.dtype) -> Tensor:
        """One value for each counter (int64, any shape and device), in `dtype`."""
        ...


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers of mean 0 and standard deviation `std`, computed in float64 and then rounded."""

    std: float

    def draw(self, key: int, counters: Tensor, *, dtype: torch.dtype) -> Tensor:
        return (normal(key, counters, dtype=torch.float64) * self.std).to(dtype)


@dataclass(frozen=True)
class Constant:
    """The same number everywhere."""

    value: float

    def draw(self, key: int, counters: Tensor, *, dtype: torch.dtype) -> Tensor:
        return torch.full_like(counters, self.value, dtype=dtype)


ZEROS = Constant(0.0)
ONES = Constant(1.0)
