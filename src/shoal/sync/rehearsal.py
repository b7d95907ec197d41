"""The first steps of a sync by priority: when gradients are ready, how fast the wire is, and what follows from it.

In these steps nothing leaves before the backward is over. So the backward is timed on a quiet wire, and the wire while
nobody computes. The slowest rank's times count, and all ranks come to one order.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from shoal.comm.buckets.leaving_order import Partition, leaving_order
from shoal.comm.buckets.partitioned import PartitionedBucket
from shoal.comm.collective import Collective

STEPS = 3
"""The first is slow, for many reasons; the median of three is not."""
SHORTEST_S = 1e-9
"""One rank has no wire."""


class Rehearsal:
    """`group`: all ranks that share the gradients of `buckets`."""

    def __init__(self, buckets: Sequence[PartitionedBucket], group: Collective) -> None:
        self._buckets, self._group = buckets, group
        self._ready_s: list[list[float]] = []
        self._wire_s: list[float] = []
        self._used: Sequence[int] = ()

    @property
    def over(self) -> bool:
        """Enough was seen."""
        return len(self._wire_s) == STEPS

    def note(self, *, used: Sequence[int], begin_s: float, wire_s: float) -> None:
        """A step is over: parameters as the forward came to them, the time its last backward began, seconds of the
        wire for all of the gradients.
        """
        self._used = self._used or used
        self._ready_s.append([bucket.filled_s - begin_s for bucket in self._buckets])
        self._wire_s.append(wire_s)

    def order(self, sizes: Sequence[int], *, credit_bytes: int) -> list[int]:
        """The order of all partitions, the same on every rank; `sizes` are the bytes of each."""
        place = {index: float(place) for place, index in enumerate(self._used)}
        needed = [min(place.get(index, float(len(place))) for index in bucket.slices) for bucket in self._buckets]
        ready_s = [statistics.median(times) for times in zip(*self._ready_s, strict=True)]
        *agreed, wire_s = self._slowest([*needed, *ready_s, statistics.median(self._wire_s)])
        partitions = {
            number: Partition(sizes[number], agreed[len(needed) + index], agreed[index])
            for index, bucket in enumerate(self._buckets)
            for number in bucket.partitions
        }
        rate = sum(sizes) / max(wire_s, SHORTEST_S)
        return leaving_order([partitions[n] for n in range(len(sizes))], bytes_s=rate, credit_bytes=credit_bytes)

    def _slowest(self, own: Sequence[float]) -> list[float]:
        agreed = torch.tensor(own, dtype=torch.float64)
        self._group.all_reduce(agreed, "max").wait()
        return agreed.tolist()
