"""The seam to the wire: a process group that wraps any backend.

FSDP2, DTensor and pipelining speak `ProcessGroup` and nothing else, so everything that Shoal wants to know or do about
communication happens in one subclass of it: counting bytes and exposed seconds, turning a backend's timeout into a
sentence that names rank and operation, and the conditions that tests impose.

Only the operations that have a caller are wrapped; a call of any other fails loudly in the base class.
"""

# pyright: reportIncompatibleMethodOverride=false
# The stubs of ProcessGroup list several overloads under one name; these are the forms that backends implement.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from shoal.comm.conditions import Conditions, Fault, after, before
from shoal.comm.diagnosis import Diagnosis
from shoal.comm.ledger import Ledger
from shoal.comm.volume import Sent, Volume
from shoal.errors import CollectiveError

Launch = Callable[[], Any]


class SeamWork(dist.Work):
    """A collective under way. `wait` blocks until it is done and books the time as exposed."""

    def __init__(self, seam: Seam, inner: Any, *, operation: str, call: int, due_s: float, finish: Launch):
        super().__init__()
        self._seam, self._inner, self._operation, self._call = seam, inner, operation, call
        self._due_s, self._finish, self._done = due_s, finish, False
        self._started_s = time.perf_counter()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `CollectiveError` naming the operation and the ranks that did not come."""
        if self._done:
            return True
        begin_s = time.perf_counter()
        try:
            if self._inner is not None:
                self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except RuntimeError as error:
            raise self._seam.explained(error, self._operation, self._call, time.perf_counter() - begin_s) from None
        if self._due_s:
            time.sleep(max(0.0, self._due_s - time.perf_counter()))
        self._finish()
        self._done = True
        self._seam.ledger.waited(self._operation, time.perf_counter() - begin_s, begin_s - self._started_s)
        return True

    def is_completed(self) -> bool:
        arrived = self._inner is None or self._inner.is_completed()
        return self._done or (arrived and time.perf_counter() >= self._due_s)

    def get_future(self) -> Any:
        return self._inner.get_future()


class Seam(dist.ProcessGroup):
    """Wraps `inner`, a backend's process group of the same rank and size. `why` says for people why it is that one."""

    def __init__(
        self,
        inner: Any,
        *,
        backend: str,
        why: str = "",
        label: str,
        ledger: Ledger,
        diagnosis: Diagnosis | None = None,
        conditions: Conditions | None = None,
        volume: Volume | None = None,
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self.inner, self.backend, self.why, self.label, self.ledger = inner, backend, why, label, ledger
        self._diagnosis, self._conditions = diagnosis, conditions
        self._volume = volume or Volume(backend, inner.rank(), ("",) * inner.size())
        self._calls: dict[str, int] = {}
        self._started, self._busy_until_s = 0, 0.0

    def getBackendName(self) -> str:
        return f"shoal over {self.backend}"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _listed(tensors), opts or c10d.AllreduceOptions()
        return self._through("all_reduce", tensors, tensors, lambda: self.inner.allreduce(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _listed(tensors), opts or c10d.BroadcastOptions()
        launch = lambda: self.inner.broadcast(tensors, opts)  # noqa: E731
        return self._through("broadcast", tensors, tensors, launch, peer=opts.rootRank)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _listed(tensors), opts or c10d.ReduceOptions()
        launch = lambda: self.inner.reduce(tensors, opts)  # noqa: E731
        return self._through("reduce", tensors, tensors, launch, peer=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._through("all_gather", inputs, outputs[0], lambda: self.inner.allgather(outputs, inputs, opts))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._through("all_gather", [input], [output], lambda: self.inner._allgather_base(output, input, opts))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        launch = lambda: self.inner._reduce_scatter_base(output, input, opts)  # noqa: E731
        return self._through("reduce_scatter", [input], [output], launch)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllToAllOptions()
        launch = lambda: self.inner.alltoall_base(output, input, out_sizes, in_sizes, opts)  # noqa: E731
        return self._through("all_to_all", [input], [output], launch, parts=in_sizes)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        launch = lambda: self.inner.gather(outputs, inputs, opts)  # noqa: E731
        return self._through("gather", inputs, inputs, launch, peer=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        launch = lambda: self.inner.scatter(outputs, inputs, opts)  # noqa: E731
        return self._through("scatter", outputs * self.size(), outputs, launch, peer=opts.rootRank)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        return self._through("send", tensors, tensors, lambda: self.inner.send(tensors, dstRank, tag), peer=dstRank)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        return self._through("recv", tensors, tensors, lambda: self.inner.recv(tensors, srcRank, tag))

    def barrier(self, opts: Any = None) -> Any:
        return self._through("barrier", [], [], lambda: self.inner.barrier(opts or c10d.BarrierOptions()))

    def explained(self, error: RuntimeError, operation: str, call: int, waited_s: float) -> CollectiveError:
        """The backend's complaint as a sentence that names who did not come."""
        what = f"{operation} number {call} of group '{self.label}'"
        if self._diagnosis is None:
            return CollectiveError(f"rank {self.rank()}: {what} failed after {waited_s:.1f} s: {error}")
        return CollectiveError(self._diagnosis.sentence(what, self._started, waited_s, str(error)))

    def _through(
        self,
        operation: str,
        payload: Any,
        results: Sequence[torch.Tensor],
        launch: Launch,
        *,
        peer: int = 0,
        parts: Sequence[int] = (),
    ) -> SeamWork:
        call = self._calls.get(operation, 0)
        self._calls[operation] = call + 1
        self._started += 1
        fault = self._conditions.fault(operation, call) if self._conditions else None
        before(fault)
        sent = self._volume(operation, sum(map(_bytes, payload)), peer=peer, parts=parts)
        self.ledger.sent(operation, sent)
        inner = self._launched(launch, fault, operation, call)
        finish = lambda: after(fault, results)  # noqa: E731
        return SeamWork(self, inner, operation=operation, call=call, due_s=self._due_s(sent), finish=finish)

    def _launched(self, launch: Launch, fault: Fault | None, operation: str, call: int) -> Any:
        if fault is not None and fault.kind == "drop":
            return None
        begin_s = time.perf_counter()
        try:
            return launch()
        except RuntimeError as error:
            raise self.explained(error, operation, call, time.perf_counter() - begin_s) from None

    def _due_s(self, sent: Sent) -> float:
        """When a throttled wire has taken `sent`, too; in the past where there is no throttle."""
        wire_s = self._conditions.wire_s(sent) if self._conditions else 0.0
        if wire_s == 0.0:
            return 0.0
        self._busy_until_s = max(self._busy_until_s, time.perf_counter()) + wire_s
        return self._busy_until_s


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
