"""How far the run has come through its data: the positions that are leased and those that are committed.

A position counts samples over the whole run, epochs included. `Interval(a, b)` is [a, b); an `IntervalSet` keeps
sorted, disjoint intervals that never touch, so that equal sets are equal values.

A step leases positions, computes, and commits them when its update counts, or releases them when it does not. One
integer would do for a synchronous run; sets also serve runs whose contributions overtake each other or are dropped.
Only what is committed survives a restart, so a lease that a crash cut short is the first to be handed out again: every
position is used in exactly one committed step. World size has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.errors import CorruptCheckpoint


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
        if not (self.parts and other.parts):
            return self if self.parts else other
        return IntervalSet.of((*self.parts, *other.parts))

    def add(self, interval: Interval) -> IntervalSet:
        last = self.parts[-1] if self.parts else None
        if last is not None and last.stop == interval.start:  # as in a run that commits in order
            return IntervalSet((*self.parts[:-1], Interval(last.start, interval.stop)))
        return IntervalSet.of((*self.parts, interval))

    def remove(self, interval: Interval) -> IntervalSet:
        """The set without the positions of `interval`."""
        if self.parts == (interval,):
            return IntervalSet()
        left = (Interval(p.start, max(p.start, min(p.stop, interval.start))) for p in self.parts)
        right = (Interval(min(p.stop, max(p.start, interval.stop)), p.stop) for p in self.parts)
        return IntervalSet.of((*left, *right)) if len(interval) else self

    def first_gap(self, longest: int) -> Interval:
        """The lowest stretch outside the set, at most `longest` positions of it."""
        start = self.parts[0].stop if self.parts and self.parts[0].start == 0 else 0
        following = next((part.start for part in self.parts if part.start > start), start + longest)
        return Interval(start, min(start + longest, following))


@dataclass(frozen=True)
class Cursor:
    """Immutable; each verb returns the next cursor. A new one stands at position 0."""

    committed: IntervalSet = field(default_factory=IntervalSet)
    leased: IntervalSet = field(default_factory=IntervalSet)

    @staticmethod
    def at(position: int) -> Cursor:
        """A cursor that has committed everything before `position`."""
        return Cursor(committed=IntervalSet.of([Interval(0, position)]))

    @property
    def next_position(self) -> int:
        """The lowest position that is neither leased nor committed: where the next lease begins."""
        return self._taken().first_gap(1).start

    def lease(self, count: int) -> tuple[Cursor, Interval]:
        """Takes the next `count` free positions; fewer where a gap between taken ones is smaller.

        Runs that commit in order have no gaps, and always get `count`.

        Raises:
            ValueError: `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"a lease of {count} positions: it takes at least 1")
        interval = self._taken().first_gap(count)
        return replace(self, leased=self.leased.add(interval)), interval

    def take(self, count: int) -> tuple[Cursor, Interval]:
        """Leases as `lease` does, and commits at once."""
        if count < 1:
            raise ValueError(f"a lease of {count} positions: it takes at least 1")
        taken = self.committed.parts
        if not self.leased.parts and len(taken) == 1 and taken[0].start == 0:  # as in a run that commits in order
            stop = taken[0].stop
            return Cursor(IntervalSet((Interval(0, stop + count),)), self.leased), Interval(stop, stop + count)
        interval = self._taken().first_gap(count)
        return Cursor(self.committed.add(interval), self.leased), interval

    def commit(self, interval: Interval) -> Cursor:
        """Marks leased positions as used.

        Raises:
            ValueError: some of them are not leased, or are committed already.
        """
        self._require_leased(interval, verb="commit")
        return Cursor(committed=self.committed.add(interval), leased=self.leased.remove(interval))

    def release(self, interval: Interval) -> Cursor:
        """Gives leased positions back; the next lease begins with the lowest of them.

        Raises:
            ValueError: some of them are not leased.
        """
        self._require_leased(interval, verb="release")
        return replace(self, leased=self.leased.remove(interval))

    def to_state(self) -> dict[str, list[list[int]]]:
        """What a checkpoint keeps: {"committed": [[start, stop], ...]}. Leases are not part of it."""
        return {"committed": [[part.start, part.stop] for part in self.committed.parts]}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_state` described, with nothing leased.

        Raises:
            CorruptCheckpoint: `state` is not such a description.
        """
        try:
            parts = [Interval(*map(_whole, pair)) for pair in state["committed"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(
                f"The checkpoint's data cursor is {dict(state)!r}, not intervals under 'committed': "
                "resume from another checkpoint."
            ) from error
        return Cursor(committed=IntervalSet.of(parts))

    def _taken(self) -> IntervalSet:
        return self.committed.union(self.leased)

    def _require_leased(self, interval: Interval, *, verb: str) -> None:
        if not self.leased.covers(interval):
            committed = self.committed.covers(interval)
            found = "is committed already" if committed else "is not wholly leased"
            raise ValueError(f"cannot {verb} {interval}: it {found}; {verb} each lease once, after leasing it")


def _whole(number: object) -> int:
    """JSON's integers and nothing else: 1.0 and true would pass `int()`."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is not an integer")
    return number
