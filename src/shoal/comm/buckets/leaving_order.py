"""In which order partitions of gradients leave, when the most urgent of those that are ready goes first. Pure.

The idea is that of ByteScheduler (Peng et al., SOSP 2019, section 4): what the next forward needs first overtakes what
was ready earlier, and no more than a credit of bytes is on the wire, as what is there cannot be overtaken. All ranks
have to start their all-reduces in one order, though, and none knows what the others have ready. So the order is not
found while sending: it is played beforehand, from times that all ranks agree on, and is then the same table for all.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


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
