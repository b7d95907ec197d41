"""The first steps of `gradients.schedule = "priority"`: when gradients are ready, how fast the wire is, and the order
in which partitions of gradients leave that follows from both.

What the next forward needs first overtakes what was ready earlier, and no more than a credit of bytes is on the wire,
because what is there cannot be overtaken (Peng et al., ByteScheduler, SOSP 2019, section 4). All ranks have to start
their all-reduces in one order, though, and none knows what the others have ready. So the order is not found while
sending: it is simulated beforehand, from times that all ranks agree on, and is then the same table for all.

In the first steps nothing leaves before the backward is over. So the backward is timed on a quiet wire, and the wire
while nobody computes. The slowest rank's times count.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.comm.collective import Collective
from shoal.comm.exchanges.credited import Credited

STEPS = 3
"""The first is slow, for many reasons; the median of three is not."""
SHORTEST_S = 1e-9
"""One rank has no wire."""


class Rehearsal:
    """`buckets` are the parameters of each bucket, by index, and `exchanges` what sums them over `group`."""

    def __init__(self, buckets: Sequence[Sequence[int]], exchanges: Sequence[Credited], group: Collective) -> None:
        self._buckets, self._exchanges, self._group = buckets, exchanges, group
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
        self._ready_s.append([exchange.filled_s - begin_s for exchange in self._exchanges])
        self._wire_s.append(wire_s)

    def order(self, sizes: Sequence[int], *, credit_bytes: int) -> list[int]:
        """The order of all partitions, the same on every rank; `sizes` are the bytes of each."""
        place = {index: float(place) for place, index in enumerate(self._used)}
        needed = [min(place.get(index, float(len(place))) for index in bucket) for bucket in self._buckets]
        ready_s = [statistics.median(times) for times in zip(*self._ready_s, strict=True)]
        *agreed, wire_s = self._slowest([*needed, *ready_s, statistics.median(self._wire_s)])
        partitions = {
            number: Partition(sizes[number], agreed[len(needed) + index], agreed[index])
            for index, exchange in enumerate(self._exchanges)
            for number in exchange.partitions
        }
        rate = sum(sizes) / max(wire_s, SHORTEST_S)
        return leaving_order([partitions[n] for n in range(len(sizes))], bytes_s=rate, credit_bytes=credit_bytes)

    def _slowest(self, own: Sequence[float]) -> list[float]:
        agreed = torch.tensor(own, dtype=torch.float64)
        self._group.all_reduce(agreed, "max").wait()
        return agreed.tolist()


@dataclass(frozen=True)
class Partition:
    """`ready_s`: after the start of the backward; `needed`: when the forward asks for it, as a rank, 0 first."""

    bytes: int
    ready_s: float
    needed: float


def leaving_order(partitions: Sequence[Partition], *, bytes_s: float, credit_bytes: int) -> list[int]:
    """The indices of `partitions` as they leave on a wire of `bytes_s`; equal needs leave by index.

    One that is larger than the credit leaves alone.
    """
    coming = deque(sorted(range(len(partitions)), key=lambda index: (partitions[index].ready_s, index)))
    ready: list[tuple[float, int]] = []
    on_wire: deque[tuple[float, int]] = deque()
    now_s, order = 0.0, []
    while coming or ready:
        while coming and partitions[coming[0]].ready_s <= now_s:
            index = coming.popleft()
            heapq.heappush(ready, (partitions[index].needed, index))
        while on_wire and on_wire[0][0] <= now_s:
            on_wire.popleft()
        if not ready:
            now_s = partitions[coming[0]].ready_s
            continue
        index = ready[0][1]
        size = partitions[index].bytes
        if on_wire and sum(other for _, other in on_wire) + size > credit_bytes:
            now_s = on_wire[0][0]
            continue
        heapq.heappop(ready)
        begin_s = max(now_s, on_wire[-1][0]) if on_wire else now_s
        on_wire.append((begin_s + size / bytes_s, size))
        order.append(index)
    return order
