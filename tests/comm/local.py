"""`Collective` between threads of one process: no sockets, no processes, sums in rank order.

It serves tests and code written against `Collective`. A collective completes when the last rank has called it; `wait`
then copies this rank's result into place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.collective import Handle, Reduction, ordinary
from shoal.errors import CollectiveError

Results = Callable[[list[Any]], Sequence[torch.Tensor | None]]


@dataclass
class _Meeting:
    """One collective: what each rank brought, and an event for when all have."""

    brought: dict[int, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)
    results: Sequence[torch.Tensor | None] = ()


class _Hub:
    """Where the ranks of one group meet, by the number of the call or by (source, target, tag)."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._meetings: dict[Any, _Meeting] = {}
        self._lock = threading.Lock()

    def bring(self, key: Any, rank: int, thing: Any, *, expected: int, results: Results) -> _Meeting:
        with self._lock:
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.brought[rank] = thing
            if len(meeting.brought) == expected:
                del self._meetings[key]
                meeting.results = results([meeting.brought[r] for r in sorted(meeting.brought)])
                meeting.complete.set()
        return meeting


@dataclass
class _LocalHandle:
    meeting: _Meeting
    index: int
    output: torch.Tensor | None
    what: str
    timeout_s: float

    def wait(self) -> None:
        if not self.meeting.complete.wait(self.timeout_s):
            came = sorted(self.meeting.brought)
            raise CollectiveError(f"{self.what} timed out after {self.timeout_s} s: only ranks {came} came")
        result = self.meeting.results[self.index]
        if self.output is not None and result is not None:
            self.output.copy_(result)


class LocalCollective:
    """One rank of a group of threads. Make a whole group with `local_group`."""

    wire = "threads of one process"

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.rank, self.size, self._hub = rank, hub.size, hub
        self._calls = 0
        self._messages: dict[tuple[int, int, int], int] = {}

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return ordinary(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> Handle:
        return self._meet("all_reduce", tensor.clone(), tensor, lambda all_: [_reduced(all_, op)] * self.size)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        parts = lambda all_: list(_reduced(all_, "sum").chunk(self.size))  # noqa: E731
        return self._meet("reduce_scatter", input.clone(), output, parts)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return self._meet("all_gather", input.clone(), output, lambda all_: [torch.cat(all_)] * self.size)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
    ) -> Handle:
        parts = input.clone().split(list(input_sizes)) if input_sizes else input.clone().chunk(self.size)
        exchanged = lambda all_: [torch.cat([a[r] for a in all_]) for r in range(self.size)]  # noqa: E731
        return self._meet("all_to_all", parts, output, exchanged)

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle:
        return self._meet("broadcast", tensor.clone(), tensor, lambda all_: [all_[root]] * self.size)

    def reduce(self, tensor: torch.Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        output = tensor if self.rank == root else None
        return self._meet("reduce", tensor.clone(), output, lambda all_: [_reduced(all_, op)] * self.size)

    def gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, *, root: int = 0) -> Handle:
        def deliver(all_: list[Any]) -> list[torch.Tensor | None]:
            for target, (value, _) in zip(all_[root][1], all_, strict=True):
                target.copy_(value)
            return [None] * self.size

        return self._meet("gather", (input.clone(), outputs), None, deliver)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int = 0) -> Handle:
        return self._meet("scatter", [part.clone() for part in inputs], output, lambda all_: all_[root])

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        return self._pair("send", tensor.clone(), None, (self.rank, to, tag))

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        return self._pair("recv", None, tensor, (source, self.rank, tag))

    def barrier(self) -> Handle:
        return self._meet("barrier", None, None, lambda all_: [None] * self.size)

    def _meet(self, what: str, thing: Any, output: torch.Tensor | None, results: Results) -> Handle:
        self._calls += 1
        meeting = self._hub.bring(self._calls, self.rank, thing, expected=self.size, results=results)
        return _LocalHandle(meeting, self.rank, output, what, self._hub.timeout_s)

    def _pair(self, what: str, thing: Any, output: torch.Tensor | None, channel: tuple[int, int, int]) -> Handle:
        number = self._messages[channel] = self._messages.get(channel, 0) + 1
        side = 0 if what == "send" else 1
        arrived: Results = lambda both: [both[0]]  # noqa: E731
        meeting = self._hub.bring((channel, number), side, thing, expected=2, results=arrived)
        if what == "send":  # buffered: the sender's tensor was copied, so it need not wait
            return _Sent()
        return _LocalHandle(meeting, 0, output, what, self._hub.timeout_s)


class _Sent:
    def wait(self) -> None:
        """A buffered send is done when it was called."""


def local_group(size: int, *, timeout_s: float = 30.0) -> list[LocalCollective]:
    """The ranks of one group; give each to a thread of its own."""
    hub = _Hub(size, timeout_s)
    return [LocalCollective(hub, rank) for rank in range(size)]


def _reduced(tensors: list[torch.Tensor], op: Reduction) -> torch.Tensor:
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    return functools.reduce(combine, tensors)
