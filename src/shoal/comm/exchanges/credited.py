"""Sums that leave in a given order, as soon as they are filled, a credit of bytes at a time.

What is on the wire cannot be overtaken, and a small message of another group waits behind it; so little should be
there: just enough to keep it busy (Peng et al., ByteScheduler, SOSP 2019, section 4.2). A thread waits for what is on
the wire and lets the next leave, so that sending goes on while the caller computes, between two steps too.

All ranks follow the same order. Sums depend on what is in a partition, not on when it leaves. Where a coded sum goes on
with a second round, the thread starts it, in the same order but at any time; so later rounds have a group of their own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import Exchange, Segment
from shoal.comm.ledger import Ledger
from shoal.comm.worker import Worker

OPERATION = "all_reduce"


class PartitionSum(Exchange, Protocol):
    """An exchange in place, in the memory of `result`. `payload_bytes` is what a rank has to say of it."""

    @property
    def payload_bytes(self) -> int: ...


NewPartitionSum = Callable[[Collective, Tensor, Sequence[Segment]], PartitionSum]
"""From a group, a part of a flat buffer and what lies in it, to their sum."""


class CreditQueue:
    """Makes sums, over groups that nobody else uses. `ledger` is where the groups book what they send."""

    def __init__(self, *, credit_bytes: int, ledger: Ledger) -> None:
        self._credit_bytes, self._ledger = credit_bytes, ledger
        self._sums: list[PartitionSum] = []
        self.sizes: list[int] = []
        """Bytes of every payload."""
        self._order: deque[int] = deque()
        self._filled: set[int] = set()
        self._summed: set[int] = set()
        self._on_wire_bytes = 0
        self._error: Exception | None = None
        self._turn = threading.Condition()
        self._worker = Worker(lambda: None, name="shoal-credit")

    def add(self, partition: PartitionSum) -> int:
        """The number of one more sum that is made in every round."""
        self._sums.append(partition)
        self.sizes.append(partition.payload_bytes)
        return len(self._sums) - 1

    def begin(self) -> None:
        """A new round: nothing is filled. The last one is over."""
        self._filled.clear()
        self._summed.clear()

    def follow(self, order: Sequence[int]) -> None:
        """From now on the partitions of this round leave, in `order`, which has each of them once."""
        with self._turn:
            self._order.extend(order)
            self._send()

    def fill(self, indices: Iterable[int]) -> None:
        """These partitions hold this rank's part. Waits for no other rank; coded ones are encoded as they leave."""
        with self._turn:
            self._filled.update(indices)
            self._send()

    def wait(self, indices: Iterable[int]) -> None:
        """Returns when these partitions are sums. Raises what went wrong with any."""
        wanted = set(indices)
        begin_s = time.perf_counter()
        with self._turn:
            self._turn.wait_for(lambda: self._error is not None or wanted <= self._summed)
            if self._error is not None:
                raise self._error
        waited_s = time.perf_counter() - begin_s
        self._ledger.waited(OPERATION, exposed_s=waited_s, hidden_s=-waited_s)

    def close(self) -> None:
        """Ends the thread."""
        self._worker.close()

    def _send(self) -> None:
        """Sends what may leave. The caller holds the lock."""
        while self._order and self._order[0] in self._filled and self._error is None:
            size = self.sizes[self._order[0]]
            if self._on_wire_bytes and self._on_wire_bytes + size > self._credit_bytes:
                return
            index = self._order.popleft()
            self._on_wire_bytes += size
            self._sums[index].send(self._sums[index].result)
            self._worker.do(lambda index=index: self._arrive(index), what=OPERATION)

    def _arrive(self, index: int) -> None:
        """The thread's part: sees one through to its end, and lets the next leave."""
        try:
            with self._ledger.behind():
                self._sums[index].settle()
                self._sums[index].wait()
            with self._turn:
                self._on_wire_bytes -= self.sizes[index]
                self._summed.add(index)
                self._send()
                self._turn.notify_all()
        except Exception as error:
            with self._turn:
                self._error = error
                self._turn.notify_all()
            raise


class Credited:
    """The sum of a buffer by `queue`, in partitions of which each is one of `sums`.

    `partitions` are their numbers in the queue; `filled_s` is when the last round filled the buffer.
    """

    def __init__(self, queue: CreditQueue, buffer: Tensor, sums: Sequence[PartitionSum]) -> None:
        self.result, self.filled_s = buffer, 0.0
        self.partitions = [queue.add(partition) for partition in sums]
        self._queue, self._sums = queue, sums

    def start(self) -> None:
        """The queue begins its rounds itself."""
        for partition in self._sums:
            partition.start()

    def send(self, buffer: Tensor) -> None:
        self.filled_s = time.perf_counter()
        self._queue.fill(self.partitions)

    def land(self) -> None:
        self.wait()

    def settle(self) -> None:
        """Nothing follows the sum."""

    def wait(self) -> None:
        self._queue.wait(self.partitions)

    def commit(self) -> None:
        for partition in self._sums:
            partition.commit()
