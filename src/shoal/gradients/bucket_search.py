"""The bucket size, found in the first steps: every size in turn, several times; the fastest stays.

Small buckets leave early, large ones use the wire better; which matters more depends on the machine. The sizes take
turns, so that a slow minute slows all of them, and a median ignores the slow first step. Times are those of the slowest
rank, equal on all ranks, so all of them choose alike.

The choice is saved, because over Gloo the order in which three or more ranks sum depends on a number's place in its
message. (Shared memory sums in the order of ranks; two ranks have only one order.) A resumed run keeps the size, or
continues the search. Two separate runs may choose different sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SMALLEST_BYTES, LARGEST_BYTES = 1 << 20, 64 << 20
ROUNDS = 5


def candidates(gradient_bytes: int) -> list[int]:
    """Powers of two from 1 MiB to the first that holds the whole gradient, 64 MiB at most."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < min(gradient_bytes, LARGEST_BYTES):
        sizes.append(2 * sizes[-1])
    return sizes


class BucketSearch:
    """Which of `sizes`, in bytes. `note` what each step took; `size` is that of the next."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._seconds: list[float] = []
        self._chosen: int | None = sizes[0] if len(sizes) == 1 else None

    @property
    def chosen(self) -> int | None:
        """None as long as it searches."""
        return self._chosen

    @property
    def size(self) -> int:
        """Bytes of a bucket in the next step."""
        return self._chosen or self._sizes[len(self._seconds) % len(self._sizes)]

    def note(self, seconds: float) -> None:
        """The step with `size` took so long. Ties go to the smaller size."""
        self._seconds.append(seconds)
        if len(self._seconds) == ROUNDS * len(self._sizes):
            medians = [statistics.median(self._seconds[turn :: len(self._sizes)]) for turn in range(len(self._sizes))]
            self._chosen = self._sizes[medians.index(min(medians))]

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"sizes": self._sizes, "seconds": self._seconds, "chosen": self._chosen}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `to_state` gave, with its sizes."""
        self._sizes, self._seconds = list(state["sizes"]), list(state["seconds"])
        self._chosen = state["chosen"]
