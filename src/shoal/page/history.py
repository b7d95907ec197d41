"""One measurement over the steps in bounded memory: buckets of neighbouring steps, each with its mean and its range.

A bucket is one step wide at first, so a short run is kept as it is. When there are more than `limit` buckets, each two
neighbours become one, twice as wide: a run of any length takes at most `limit` buckets, all equally wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LIMIT = 512


@dataclass
class Bucket:
    """The values of some steps. Values that are not finite are counted and in nothing else."""

    last_step: int
    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    nonfinite: int = 0

    def add(self, step: int, value: float) -> None:
        """One value more."""
        self.last_step = max(self.last_step, step)
        if math.isfinite(value):
            self.count += 1
            self.total += value
            self.low, self.high = min(self.low, value), max(self.high, value)
        else:
            self.nonfinite += 1

    def merge(self, other: Bucket) -> None:
        """Takes up a later bucket."""
        self.last_step = max(self.last_step, other.last_step)
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.nonfinite += other.nonfinite


@dataclass
class History:
    """Values by step, the steps ascending except where `void_after` takes some back."""

    limit: int = LIMIT
    width: int = 1
    last: float | None = None
    """The newest value, NaN where it was not finite. Where `void_after` took it back, the mean of the newest bucket."""
    _last_step: int = 0
    _buckets: dict[int, Bucket] = field(default_factory=dict)

    def add(self, step: int, value: float) -> None:
        """The value of `step`."""
        self.last, self._last_step = value if math.isfinite(value) else math.nan, step
        self._buckets.setdefault(max(0, step - 1) // self.width, Bucket(step)).add(step, value)
        while len(self._buckets) > self.limit:
            self._widen()

    def void_after(self, step: int) -> None:
        """Forgets the steps behind `step`. A bucket that lies on both sides of it keeps all its values."""
        for index in [index for index in self._buckets if index * self.width >= step]:
            del self._buckets[index]
        if self._last_step > step:
            newest = self._buckets[max(self._buckets)] if self._buckets else None
            self.last = None if newest is None else newest.total / newest.count if newest.count else math.nan
            self._last_step = step

    def points(self) -> list[tuple[int, float | None, float | None, float | None]]:
        """(last step, mean, lowest, highest) of each bucket, ascending; None where no value was finite."""
        return [
            (b.last_step, b.total / b.count, b.low, b.high) if b.count else (b.last_step, None, None, None)
            for b in self.buckets()
        ]

    def buckets(self) -> list[Bucket]:
        """All buckets, ascending."""
        return [bucket for _, bucket in sorted(self._buckets.items())]

    def count(self) -> int:
        """How many values are finite."""
        return sum(bucket.count for bucket in self._buckets.values())

    def total(self) -> float:
        """The sum of all finite values."""
        return math.fsum(bucket.total for bucket in self._buckets.values())

    def _widen(self) -> None:
        self.width *= 2
        merged: dict[int, Bucket] = {}
        for index, bucket in sorted(self._buckets.items()):
            if index // 2 in merged:
                merged[index // 2].merge(bucket)
            else:
                merged[index // 2] = bucket
        self._buckets = merged
