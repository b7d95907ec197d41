"""The seam to the wire: a process group that wraps any backend.

FSDP2, DTensor and pipelining speak `ProcessGroup` and nothing else, so everything that Shoal wants to know or do about
communication happens in one subclass of it: counting bytes and exposed seconds, turning a backend's timeout into a
sentence that names rank and operation, and the conditions that tests impose.

c10d has two names for some operations: new ones (`all_gather_single`, torch 2.13) and old ones (`_allgather_base`). The
seam has both, and calls `inner` by the old ones. No backend is registered with c10d, so that nothing goes past the
seam: a call of an operation that it does not wrap fails loudly in the base class.
"""

# pyright: reportIncompatibleMethodOverride=false
# The stubs of ProcessGroup list several overloads under one name; these are the forms that backends implement.

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from shoal.comm.c10d_forms import JoinedWork, SpreadWork, check_blocks, listed
from shoal.comm.checking import CollectiveChecker, Rows
from shoal.comm.conditions import Conditions, Fault, after, before
from shoal.comm.config import BackendChoice
from shoal.comm.diagnosis import CallLog, Diagnosis
from shoal.comm.ledger import Ledger
from shoal.comm.seam_work import Explain, SeamWork
from shoal.comm.volume import Volume
from shoal.errors import CollectiveError

Launch = Callable[[], Any]
_MESSAGES = ("send", "recv")
_EVEN: Rows = ((), ())


class Seam(dist.ProcessGroup):
    """Wraps `inner`, a backend's process group of the same rank and size; `choice` says which backend, and why.

    `volume` counts what is sent, `diagnosis` explains failures, `checker` compares calls before they are made, and
    `conditions` are what tests impose. `device` is where the group's tensors lie.
    """

    supports_coalescing = supports_time_estimate = supports_splitting = False
    """What c10d asks of a group's backend, which the seam is itself."""

    def __init__(
        self,
        inner: Any,
        *,
        choice: BackendChoice,
        label: str,
        ledger: Ledger,
        device: torch.device = torch.device("cpu"),
        volume: Volume | None = None,
        diagnosis: Diagnosis | None = None,
        checker: CollectiveChecker | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self.inner, self.label, self.ledger = inner, label, ledger
        self.backend, self.why = choice.backend, choice.why
        self._device, self._conditions = device, conditions
        self._volume = volume or Volume(choice.backend, inner.rank(), ("",) * inner.size())
        self._diagnosis, self._checker = diagnosis, checker
        self._log = diagnosis.log if diagnosis else CallLog()
        self._calls: dict[str, int] = {}
        self._name, self._description = "", ""
        self.opener: Callable[[Sequence[int], str], Seam] | None = None
        """Opens groups of some of its ranks, by lanes, for PyTorch's `new_group`; None where nobody asks it to."""
        self._ref: weakref.ref[Seam] = weakref.ref(self)

    @property
    def _device_types(self) -> list[torch.device]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [torch.device(self._device.type)]

    def _get_backend(self, device: torch.device) -> Seam:
        if device.type != self._device.type:
            raise RuntimeError(f"group '{self.label}' takes tensors on {self._device.type}, not on {device.type}")
        return self

    @property
    def device(self) -> torch.device:
        """Where its tensors lie, all of them."""
        return self._device

    @property
    def log(self) -> CallLog:
        """The last collectives of this rank here."""
        return self._log

    @property
    def pending(self) -> int:
        """Calls that no thread of the backend has begun, as far as Shoal can see."""
        return max(getattr(holder, "pending", 0) for holder in (self._checker, self.inner))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The identity of each rank's host, in rank order."""
        return self._volume.hosts

    def getBackendName(self) -> str:
        return f"shoal over {self.backend}"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        self.inner.shutdown()

    def abort(self) -> None:
        self.inner.abort()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = listed(tensors), opts or c10d.AllreduceOptions()
        launch = lambda: self.inner.allreduce(tensors, opts)  # noqa: E731
        return self._through("all_reduce", tensors, tensors, launch, reduce_op=opts.reduceOp)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        each = _with_reduction(c10d.AllreduceOptions(), opts)
        return JoinedWork([self.allreduce([tensor], each) for tensor in tensors])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = listed(tensors), opts or c10d.BroadcastOptions()
        launch = lambda: self.inner.broadcast(tensors, opts)  # noqa: E731
        return self._through("broadcast", tensors, tensors, launch, root=opts.rootRank)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = listed(tensors), opts or c10d.ReduceOptions()
        launch = lambda: self.inner.reduce(tensors, opts)  # noqa: E731
        return self._through("reduce", tensors, tensors, launch, root=opts.rootRank, reduce_op=opts.reduceOp)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        launch = lambda: self.inner.allgather(outputs, inputs, opts)  # noqa: E731
        return self._through("all_gather", inputs, outputs[0], launch, lists=True)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        return self._through("all_gather", [input], [output], lambda: self.inner._allgather_base(output, input, opts))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return JoinedWork([self.all_gather_single(out, own) for out, own in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        launch = lambda: self.inner._reduce_scatter_base(output, input, opts)  # noqa: E731
        return self._through("reduce_scatter", [input], [output], launch, reduce_op=opts.reduceOp)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        each = _with_reduction(c10d.ReduceScatterOptions(), opts)
        return JoinedWork([self.reduce_scatter_single(o, i, each) for o, i in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllToAllOptions()
        launch = lambda: self.inner.alltoall_base(output, input, out_sizes, in_sizes, opts)  # noqa: E731
        return self._through("all_to_all", [input], [output], launch, rows=(in_sizes, out_sizes))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """The form of lists, as the backward of `torch.distributed.nn.all_gather` calls it."""
        own = torch.cat([each.reshape(-1) for each in inputs])
        whole = own.new_empty(sum(each.numel() for each in outputs))
        sizes = [each.numel() for each in outputs], [each.numel() for each in inputs]
        return SpreadWork(self.all_to_all_single(whole, own, *sizes, opts), whole, outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (output,), (blocks,) = outputs, inputs
        check_blocks(output, blocks, rank=self.rank(), size=self.size())
        own = torch.cat([each.reshape(-1) for each in blocks])
        whole = output.new_empty(output.numel())
        return SpreadWork(self.reduce_scatter_single(whole, own, opts), whole, [output])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType]
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # pyright: ignore[reportAssignmentType]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # pyright: ignore[reportAssignmentType]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        launch = lambda: self.inner.gather(outputs, inputs, opts)  # noqa: E731
        return self._through("gather", inputs, outputs[0] if outputs else [], launch, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        launch = lambda: self.inner.scatter(outputs, inputs, opts)  # noqa: E731
        return self._through("scatter", outputs * self.size(), outputs, launch, root=opts.rootRank)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        return self._through(
            "send",
            tensors,
            tensors,
            lambda: self.inner.send(tensors, dstRank, tag),
            root=dstRank,
            ends=(self.rank(), dstRank),
        )

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        return self._through(
            "recv", tensors, tensors, lambda: self.inner.recv(tensors, srcRank, tag), ends=(srcRank, self.rank())
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._through("barrier", [], [], lambda: self.inner.barrier(opts or c10d.BarrierOptions()))

    def explained(self, error: RuntimeError, operation: str, call: int, waited_s: float) -> CollectiveError:
        """The backend's complaint as a sentence that names who did not come."""
        what = f"{operation} number {call} of group '{self.label}'"
        if self._diagnosis is None:
            return CollectiveError(f"rank {self.rank()}: {what} failed after {waited_s:.1f} s: {error}")
        return CollectiveError(self._diagnosis.sentence(what, waited_s, str(error)))

    def _through(
        self,
        operation: str,
        payload: Any,
        results: Sequence[torch.Tensor],
        launch: Launch,
        *,
        root: int | None = None,
        rows: Rows = _EVEN,
        reduce_op: Any = None,
        lists: bool = False,
        ends: tuple[int, int] | None = None,
    ) -> SeamWork:
        """`root` is also the receiver of a message, and `ends` are its sender and receiver. `lists`: the form with a
        tensor for each rank, which is Gloo's where the backend has an algorithm of its own."""
        call = self._calls.get(operation, 0)
        self._calls[operation] = call + 1
        if operation not in _MESSAGES:
            tensors = results if operation == "scatter" else payload
            self._log.add(operation, tensors, reduce_op, root, bool(rows[0] or rows[1]), 3)
            if self._checker is not None:
                launch = partial(self._checker.call, self._log.count, self._log.last(), launch, results, rows)
        fault = self._conditions.fault(operation, call) if self._conditions else None
        before(fault)
        as_gloo = self._volume.left_to_gloo(operation, payload, reduce_op, lists=lists)
        sent = self._volume(
            operation, sum([tensor.nbytes for tensor in payload]), peer=root or 0, parts=rows[0], as_gloo=as_gloo
        )
        self.ledger.sent(operation, sent)
        explain = partial(_explained, self._ref, operation, call)
        finish: Callable[[], object] = partial(after, fault, results)
        if (journal := self.ledger.journal) is not None:
            finish = journal.began(
                self.label, operation, size=self.size(), ends=ends, sent_bytes=sent.bytes_sent, then=finish
            )
        inner = self._launched(launch, fault, explain)
        due_s = self._conditions.due_s(sent) if self._conditions else 0.0
        return SeamWork(
            inner, operation=operation, ledger=self.ledger, explain=explain, results=results, due_s=due_s,
            finish=finish, label=self.label,
        )  # fmt: skip

    def _launched(self, launch: Launch, fault: Fault | None, explain: Explain) -> Any:
        if fault is not None and fault.kind == "drop":
            return None
        begin_s = time.perf_counter()
        try:
            return launch()
        except RuntimeError as error:
            raise explain(error, time.perf_counter() - begin_s) from None


def _explained(
    seam: weakref.ref[Seam], operation: str, call: int, error: RuntimeError, waited_s: float
) -> CollectiveError:
    """`Seam.explained` for those who must not hold the group."""
    if (here := seam()) is None:
        return CollectiveError(f"{operation} number {call} failed after {waited_s:.1f} s: {error}")
    return here.explained(error, operation, call, waited_s)


def _with_reduction(options: Any, of: Any) -> Any:
    """`options` of one of several in a call."""
    if of is not None:
        options.reduceOp = of.reduceOp
    return options
