"""Stretches of positions: one of them, and a set of them.

A position counts samples over the whole run, epochs included. `Interval(a, b)` is the half-open stretch [a, b);
`IntervalSet` keeps sorted, disjoint stretches that never touch, so that two equal sets are equal values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, order=True)
class Interval:
    """The positions start, start + 1, ..., stop - 1.

    Raises:
        ValueError: `start` is negative or lies behind `stop`.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"[{self.start}, {self.stop}) is no interval: it must hold that 0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def positions(self) -> np.ndarray:
        """The positions themselves, int64 [len]."""
        return np.arange(self.start, self.stop, dtype=np.int64)


@dataclass(frozen=True)
class IntervalSet:
    """A set of positions as sorted, disjoint, non-touching, non-empty intervals. Build one with `of`."""

    parts: tuple[Interval, ...] = ()

    @staticmethod
    def of(intervals: Iterable[Interval]) -> IntervalSet:
        """The union of `intervals`, which may overlap, touch and come in any order."""
        merged: list[Interval] = []
        for part in sorted(interval for interval in intervals if len(interval)):
            if merged and part.start <= merged[-1].stop:
                merged[-1] = Interval(merged[-1].start, max(merged[-1].stop, part.stop))
            else:
                merged.append(part)
        return IntervalSet(tuple(merged))

    @property
    def count(self) -> int:
        """How many positions the set holds."""
        return sum(len(part) for part in self.parts)

    def covers(self, interval: Interval) -> bool:
        """Is every position of `interval` in the set?"""
        return not len(interval) or any(
            part.start <= interval.start and interval.stop <= part.stop for part in self.parts
        )

    def union(self, other: IntervalSet) -> IntervalSet:
        return IntervalSet.of((*self.parts, *other.parts))

    def add(self, interval: Interval) -> IntervalSet:
        return IntervalSet.of((*self.parts, interval))

    def remove(self, interval: Interval) -> IntervalSet:
        """The set without the positions of `interval`."""
        left = (Interval(p.start, max(p.start, min(p.stop, interval.start))) for p in self.parts)
        right = (Interval(min(p.stop, max(p.start, interval.stop)), p.stop) for p in self.parts)
        return IntervalSet.of((*left, *right)) if len(interval) else self

    def first_gap(self, longest: int) -> Interval:
        """The lowest stretch outside the set, at most `longest` positions of it."""
        start = self.parts[0].stop if self.parts and self.parts[0].start == 0 else 0
        following = next((part.start for part in self.parts if part.start > start), start + longest)
        return Interval(start, min(start + longest, following))
