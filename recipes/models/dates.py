"""Dates to rewrite: "5 March 1987 = 1987-03-05", in bytes; the answer alone counts."""

from __future__ import annotations

import calendar

import torch
from torch import Tensor

LENGTH = 40
FIRST_YEAR, YEARS = 1600, 500
LEFT_OUT = -100
"""The target of a byte that does not count."""


class Dates:
    """Sample i is drawn from i: bytes `[39]` and the bytes that follow them `[39]`."""

    def __init__(self, samples: int, first: int) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        day, month, year = (int(torch.randint(most, (), generator=generator)) for most in (28, 12, YEARS))
        question = f"{day + 1} {calendar.month_name[month + 1]} {FIRST_YEAR + year} = "
        text = f"{question}{FIRST_YEAR + year}-{month + 1:02}-{day + 1:02}\n".encode()
        whole = torch.tensor(list(text.ljust(LENGTH)))
        counts = torch.arange(LENGTH).sub(len(question)).ge(0) & (torch.arange(LENGTH) < len(text))
        return whole[:-1], torch.where(counts, whole, LEFT_OUT)[1:]


def dates() -> tuple[Dates, Dates]:
    """Training and held-out dates."""
    return Dates(20_000, 0), Dates(500, 10**6)
