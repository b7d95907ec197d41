"""How far the run has come through its data: how many positions are used.

A position counts samples over the whole run, epochs included. `Interval(a, b)` is [a, b).

A step takes the positions that follow, computes, and moves the run's cursor behind them. Only a checkpoint's cursor
survives a restart, so the positions of a step that a crash cut short are the first to be taken again: every position is
used in exactly one step that lasts. World size has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
class Cursor:
    """All positions before `next_position` are used."""

    next_position: int = 0

    def take(self, count: int) -> tuple[Cursor, Interval]:
        """The cursor behind the next `count` positions, and these.

        Raises:
            ValueError: `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"a step of {count} positions: it takes at least 1")
        stop = self.next_position + count
        return Cursor(stop), Interval(self.next_position, stop)

    def to_state(self) -> dict[str, list[list[int]]]:
        """What a checkpoint keeps: {"committed": [[0, next_position]]}, without the interval where it is empty."""
        return {"committed": [[0, self.next_position]] if self.next_position else []}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_state` described.

        Raises:
            CorruptCheckpoint: `state` is not such a description.
        """
        try:
            if state["committed"] == []:
                return Cursor()
            [[start, stop]] = state["committed"]
            if _whole(start) != 0 or _whole(stop) < 0:
                raise ValueError(f"[{start}, {stop}) does not begin with the first position")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpoint(
                f"The checkpoint's data cursor is {dict(state)!r}, not one interval from 0 under 'committed': "
                "resume from another checkpoint."
            ) from error
        return Cursor(stop)


def _whole(number: object) -> int:
    """JSON's integers and nothing else: 1.0 and true would pass `int()`."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is not an integer")
    return number
