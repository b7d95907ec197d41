"""All-reduces that leave in a given order, as soon as they are filled, a credit of bytes at a time.

What is on the wire cannot be overtaken, and a small message of another group waits behind it; so little should be
there: just enough to keep it busy (Peng et al., ByteScheduler, SOSP 2019, section 4.2). A thread waits for what is on
the wire and lets the next leave, so that sending goes on while the caller computes, between two steps too.

All ranks follow the same order. Sums depend on what is in a partition, not on when it leaves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.ledger import Ledger
from shoal.comm.worker import Worker

OPERATION = "all_reduce"


class CreditQueue:
    """Sums tensors over `group`, which nobody else uses. `ledger` is where the group books what it sends."""

    def __init__(self, group: Collective, *, credit_bytes: int, ledger: Ledger) -> None:
        self._group, self._credit_bytes, self._ledger = group, credit_bytes, ledger
        self._tensors: list[Tensor] = []
        self._order: deque[int] = deque()
        self._filled: set[int] = set()
        self._summed: set[int] = set()
        self._on_wire_bytes = 0
        self._error: Exception | None = None
        self._turn = threading.Condition()
        self._worker = Worker(lambda: None, name="shoal-credit")

    def add(self, tensor: Tensor) -> int:
        """The number of one more tensor that is summed in every round."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    @property
    def sizes(self) -> list[int]:
        """Bytes of every tensor."""
        return [tensor.nbytes for tensor in self._tensors]

    def begin(self) -> None:
        """A new round: nothing is filled. The last one is over."""
        self._filled.clear()
        self._summed.clear()

    def follow(self, order: Sequence[int]) -> None:
        """From now on the tensors of this round leave, in `order`, which has each of them once."""
        with self._turn:
            self._order.extend(order)
            self._send()

    def fill(self, indices: Iterable[int]) -> None:
        """These tensors hold this rank's part. Does not block."""
        with self._turn:
            self._filled.update(indices)
            self._send()

    def wait(self, indices: Iterable[int]) -> None:
        """Returns when these tensors are sums. Raises what went wrong with any."""
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
            size = self._tensors[self._order[0]].nbytes
            if self._on_wire_bytes and self._on_wire_bytes + size > self._credit_bytes:
                return
            index = self._order.popleft()
            self._on_wire_bytes += size
            handle = self._group.all_reduce(self._tensors[index])
            self._worker.do(lambda index=index, handle=handle: self._arrive(index, handle), what=OPERATION)

    def _arrive(self, index: int, handle: Handle) -> None:
        """The thread's part: waits for one, and lets the next leave."""
        try:
            with self._ledger.behind():
                handle.wait()
            with self._turn:
                self._on_wire_bytes -= self._tensors[index].nbytes
                self._summed.add(index)
                self._send()
                self._turn.notify_all()
        except Exception as error:
            with self._turn:
                self._error = error
                self._turn.notify_all()
            raise


class Credited:
    """The sum of a buffer over the group of `queue`, in partitions of at most `partition_bytes`.

    `partitions` are their numbers in the queue; `filled_s` is when the last round filled the buffer.
    """

    def __init__(self, queue: CreditQueue, buffer: Tensor, *, partition_bytes: int) -> None:
        numel = max(1, partition_bytes // buffer.element_size())
        self.result, self.filled_s = buffer, 0.0
        self.partitions = [queue.add(part) for part in buffer.split(numel)]
        self._queue = queue

    def start(self) -> None:
        """The queue begins its rounds itself."""

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
        """Nothing is carried over."""
