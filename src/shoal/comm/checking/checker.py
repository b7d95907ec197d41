"""`CollectiveChecker`: ranks compare every collective before they make it (`wire.check_collectives`).

A thread gathers the number and the digest of each call from all ranks, over the group itself. Where they are the same,
it makes the call; where they differ nothing is made, and every rank raises the same sentence, which names the calls and
the lines of code. A collective has to wait for the comparison, because Gloo ends the process where sizes differ; its
caller need not wait. Collectives of a group then run one after the other, without overlap.

With GPUs the caller waits for the comparison, because its streams would go on without the collective. The rows of an
uneven all-to-all are compared too: what rank i sends to rank j has to be what j expects of i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.comm.checking.call_log import Call
from shoal.comm.checking.deadlock import LOOK_S, Wait, WaitGraph
from shoal.comm.diagnosis import Diagnosis
from shoal.comm.worker import QueuedWork, Worker
from shoal.errors import CollectiveError

Rows = tuple[Sequence[int], Sequence[int]]
"""What a rank sends to each rank, and what it expects of each."""
_SLICE_S = 0.25
"""How long the thread waits for other ranks before it asks whether another group has failed."""


class CollectiveChecker:
    """Stands before `inner`, whose collectives nobody else may call. `graph` is where ranks that wait are seen."""

    def __init__(
        self, inner: Any, diagnosis: Diagnosis, *, label: str, device: torch.device, graph: WaitGraph | None
    ) -> None:
        self._comparison = _Comparison(inner, diagnosis, device, graph)
        self._label, self._graph = label, graph
        self._worker = Worker(_nothing, name="shoal-check") if device.type == "cpu" else None

    @property
    def pending(self) -> int:
        """Calls that the thread has not begun."""
        return 0 if self._worker is None else self._worker.pending

    def call(self, number: int, call: Call, launch: Callable[[], Any], results: Sequence[Tensor], rows: Rows) -> Any:
        """The work of the group's `number`-th call, which `launch` makes. Its `wait` raises `CollectiveError` where
        ranks called different things, or wait for each other in different groups."""
        if self._worker is None:
            self._comparison(number, call.digest, rows)
            return launch()
        run = partial(_compare_and_call, self._comparison, number, call.digest, rows, launch)
        wait = self._graph.call(self._label, call) if self._graph else None
        return CheckedWork(self._worker.do(run, what=str(call), outputs=results), wait)


class CheckedWork(dist.Work):
    """A collective that is compared first."""

    def __init__(self, queued: QueuedWork, wait: Wait | None) -> None:
        super().__init__()
        self._queued, self._wait = queued, wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        with self._wait or nullcontext():
            while self._wait and not timeout and not self._queued.done(LOOK_S):
                self._wait.look()
            return self._queued.wait(timeout)

    def is_completed(self) -> bool:
        return self._queued.is_completed()

    def is_success(self) -> bool:
        return self._queued.is_success()

    def result(self) -> list[Tensor]:
        return self._queued.result()

    def get_future(self) -> torch.futures.Future:
        return self._queued.get_future()


class _Comparison:
    """Of one call between all ranks of a group; refers to no checker, so that it may live in the checker's thread."""

    def __init__(self, inner: Any, diagnosis: Diagnosis, device: torch.device, graph: WaitGraph | None) -> None:
        self._inner, self._diagnosis, self._device, self._graph = inner, diagnosis, device, graph

    def __call__(self, number: int, digest: int, rows: Rows) -> None:
        """Raises `CollectiveError` where ranks differ, the same on all of them."""
        calls = self._gathered([number, digest])
        try:
            if bool((calls != calls[0]).any()):
                raise self._diagnosis.difference(number)
            if rows[0] or rows[1]:
                self._compare_rows(number, rows)
        except CollectiveError as error:
            if self._graph is not None:
                self._graph.failed = error
            raise

    def _compare_rows(self, number: int, rows: Rows) -> None:
        members = self._diagnosis.members
        n = len(members)
        every = self._gathered([*rows[0], *rows[1]])
        wrong = (every[:, :n] != every[:, n:].T).nonzero().tolist()
        if wrong:
            i, j = wrong[0]
            raise CollectiveError(
                f"{self._diagnosis.called(number)}, an all_to_all: {members[i]} sends {every[i, j]} rows to "
                f"{members[j]}, which expects {every[j, n + i]}: both have to say the "
                "same; exchange the sizes before the rows"
            )

    def _gathered(self, numbers: Sequence[int]) -> Tensor:
        """[ranks, len(numbers)]: what each rank brings."""
        own = torch.tensor(numbers, device=self._device)
        every = own.new_empty(self._inner.size() * own.numel())
        work = self._inner._allgather_base(every, own, c10d.AllgatherOptions())
        if work is not None and self._device.type != "cpu":
            work.wait()  # for the stream; the copy below waits for the numbers
            work = None
        while work is not None and not _waited(work):
            if self._graph is not None and self._graph.failed is not None:
                raise self._graph.failed
        return every.view(-1, own.numel()).cpu()


def _compare_and_call(compare: _Comparison, number: int, digest: int, rows: Rows, launch: Callable[[], Any]) -> None:
    compare(number, digest, rows)
    if (work := launch()) is not None:
        work.wait()


def _waited(work: Any) -> bool:
    """Whether `work` is over within a slice of time. Raises what it raises; it may be waited for again."""
    try:
        return work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError:
        if not work.is_completed():
            return False
    return work.wait()  # it may have ended well just after the time was over


def _nothing() -> None:
    """The group ends with those who hold it."""
