"""Whether ranks make the same calls: every call is compared before it is made, and ranks that wait for each other
are named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.comm.board import Board
from shoal.comm.diagnosis import Call, Diagnosis
from shoal.comm.worker import QueuedWork, Worker
from shoal.errors import CollectiveError

# Ranks that wait for each other in different groups are found and named.
#
# A rank that has waited for a second publishes what it waits in, and how many calls it has made in every group. So the
# others see which ranks its call still misses. If all the missing ranks wait as well, and all those that they miss, and
# so on, then nobody is left who could make the call that one of them needs: a deadlock, once two looks have found the
# same. (The wait-for graph of Holt, ACM Computing Surveys 4(3), 1972.)


LOOK_S = 1.0
"""How long a call waits for other ranks before the reason is looked for, and between two looks."""
NAMED = 8


class BlockedCall(NamedTuple):
    """What one rank waits in: call `number` of a group of `ranks` of the world. `made` counts its calls by group."""

    group: str
    number: int
    ranks: Sequence[int]
    what: str
    made: Mapping[str, int]


class WaitGraph:
    """What one rank publishes and reads, for all its groups of one generation."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._groups: dict[str, Sequence[int]] = {}
        self._made: dict[str, int] = {}
        self.failed: CollectiveError | None = None
        """What is wrong in one of this rank's groups. Whoever waits in another must not wait for its ranks."""

    def enter(self, group: str, ranks: Sequence[int]) -> None:
        """Adds a group of these ranks of the world; its name is the same on all of them."""
        self._groups[group], self._made[group] = tuple(ranks), 0

    def ranks(self, group: str) -> Sequence[int]:
        """The ranks of a group that was entered."""
        return self._groups[group]

    def call(self, group: str, what: object) -> WatchedWait:
        """Counts a call in a group, which `str(what)` describes; for the wait that follows."""
        self._made[group] += 1
        return WatchedWait(self, group, self._made[group], what)

    def publish(self, group: str, number: int, what: object) -> None:
        """This rank waits."""
        described = f"{what}, call number {number} of group '{group}'"
        row = BlockedCall(group, number, self._groups[group], described, self._made)
        self._board.publish(f"waits/{self._rank}", json.dumps(row))

    def withdraw(self) -> None:
        """It waits no more."""
        self._board.forget([f"waits/{self._rank}"])

    def cycle(self) -> dict[int, BlockedCall]:
        """The ranks that wait for each other, this one among them; empty where one of them may still go on."""
        found: dict[int, BlockedCall] = {}
        open_ = {self._rank}
        while open_:
            rows = self._read(open_)
            others = self._read({rank for row in rows.values() for rank in row.ranks})
            missed: set[int] = set()
            for rank in open_:
                row = rows.get(rank)
                if row is None or any(other not in others for other in row.ranks):
                    return {}
                behind = {other for other in row.ranks if others[other].made.get(row.group, 0) < row.number}
                if not behind:
                    return {}
                found[rank] = row
                missed |= behind
            open_ = missed - found.keys()
        return found

    def conclude(self, sentence: str) -> CollectiveError:
        """A deadlock was found: the first rank to leave it says so to those whom that will surprise."""
        self._board.publish("waits/verdict", sentence)
        self.failed = CollectiveError(sentence)
        return self.failed

    def verdict(self) -> str:
        """What was concluded; empty where nothing was."""
        return self._board.collect_some(["waits/verdict"], 0.0).get("waits/verdict", b"").decode()

    def _read(self, ranks: set[int]) -> dict[int, BlockedCall]:
        keys = {f"waits/{rank}": rank for rank in ranks}
        found = self._board.collect_some(list(keys), 0.0) if keys else {}
        return {keys[key]: BlockedCall(*json.loads(text)) for key, text in found.items()}


class WatchedWait:
    """One wait: a context, in which `look` is called each second that it lasts."""

    def __init__(self, graph: WaitGraph, group: str, number: int, what: object) -> None:
        self._graph, self._group, self._number, self._what = graph, group, number, what
        self._published = False
        self._seen: dict[int, BlockedCall] = {}

    def __enter__(self) -> WatchedWait:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A rank that gives up leaves its row: the others may rely on it. It says why, where others know."""
        if not self._published:
            return
        if kind is None:
            self._graph.withdraw()
        elif issubclass(kind, RuntimeError) and (sentence := self._graph.verdict()):
            raise CollectiveError(sentence) from None

    def look(self) -> None:
        """Raises `CollectiveError` where ranks wait for each other, now and before, or another group failed."""
        if self._graph.failed is not None:
            raise self._graph.failed
        if not self._published:
            self._graph.publish(self._group, self._number, self._what)
            self._published = True
            return
        found = self._graph.cycle()
        if found and found == self._seen:
            raise self._graph.conclude(deadlock(found))
        self._seen = found


def deadlock(found: Mapping[int, BlockedCall]) -> str:
    """The sentence that names who waits in what."""
    waits = "; ".join(f"rank {rank} waits in {row.what}" for rank, row in sorted(found.items())[:NAMED])
    return (
        f"ranks wait for each other: {waits}: ranks that share groups must make their calls in the same order; make "
        "the orders alike"
    )


# `CollectiveChecker`: ranks compare every collective before they make it (`wire.check_collectives`).
#
# A thread gathers the number and the digest of each call from all ranks, over the group itself. Where they are the
# same, it makes the call; where they differ nothing is made, and every rank raises the same sentence, which names the
# calls and the lines of code. A collective has to wait for the comparison, because Gloo ends the process where sizes
# differ; its caller need not wait. Collectives of a group then run one after the other, without overlap.
#
# With GPUs the caller waits for the comparison, because its streams would go on without the collective. The rows of an
# uneven all-to-all are compared too: what rank i sends to rank j has to be what j expects of i.


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

    def __init__(self, queued: QueuedWork, wait: WatchedWait | None) -> None:
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
