"""A process group over MPI: its collectives and messages, and calls that are under way."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from shoal.comm.board import Board
from shoal.comm.mpi_world import communicator, load_mpi

# Calls under way in MPI, and tensors as MPI takes them.
#
# Data that only moves is passed as bytes, in any dtype. MPI has no 16-bit floats: they are widened to float32, reduced
# and rounded once, which sends twice the bytes. Means are sums, divided at the end.
#
# `MpiWork` is one call; `UnderWay` keeps a group's calls alive until they are over. MPI makes progress only while it is
# asked how far it is. The waiting thread asks, spins briefly, and then sleeps longer and longer between two questions,
# because ranks may outnumber cores; MPI's own wait would keep a core busy.


_NAMES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int8: "INT8_T", torch.uint8: "UINT8_T",
    torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T", torch.bool: "C_BOOL",
}  # fmt: skip
_SHORT = (torch.float16, torch.bfloat16)
_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "SUM",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.PRODUCT: "PROD",
}
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "PROD": "LAND", "MIN": "LAND"}


def moved(mpi: Any, tensor: Tensor, *, blocks: int = 1) -> list[Any]:
    """A contiguous tensor as bytes to be moved: MPI's [memory, count, type]; its count is that of one of `blocks`."""
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes // blocks, mpi.BYTE]


def added(mpi: Any, tensor: Tensor, *, blocks: int = 1) -> list[Any]:
    """The same of numbers, in a dtype that `numbers_of` gave."""
    memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel() // blocks, getattr(mpi, _NAMES[tensor.dtype])]


def numbers_of(tensor: Tensor) -> Tensor:
    """A contiguous copy in a dtype that MPI adds. Raises `ValueError` where there is none."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ValueError("MPI takes dense tensors on the CPU: move them there, or take another transport")
    if tensor.dtype in _SHORT:
        return tensor.detach().float().contiguous()
    if tensor.dtype not in _NAMES:
        raise ValueError(f"MPI has no reduction of {tensor.dtype}: reduce in float32, or take another transport")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def operation(mpi: Any, reduce_op: Any, dtype: torch.dtype) -> Any:
    """MPI's. Raises `ValueError` where there is none."""
    name = next((name for op, name in _OPS.items() if reduce_op == op), None)
    if name is None or (reduce_op == dist.ReduceOp.AVG and not dtype.is_floating_point):
        raise ValueError(f"MPI's transport has no {reduce_op} of {dtype}: sum, and divide afterwards")
    return getattr(mpi, _LOGICAL[name] if dtype is torch.bool else name)


SPINS = 200
FIRST_SLEEP_S, LONGEST_SLEEP_S = 10e-6, 500e-6
LEFT_SLEEP_S = 5e-3
"""Between two questions of the thread that sees to calls whose group was dropped."""
LOOKED_AT = 4
"""Calls under way that each new one asks for."""


class UnderWay:
    """The unfinished calls of one communicator, which nobody else uses. MPI writes to their memory: whoever drops a
    work leaves it here, and it is asked for in later calls."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi, self._communicator = mpi, communicator
        self._works: dict[MpiWork, None] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, work: MpiWork) -> None:
        """A call that was made."""
        with self._lock:
            oldest = list(islice(self._works, LOOKED_AT))
            for each in oldest:  # the others have their turn next time
                self._works[each] = self._works.pop(each)
            self._works[work] = None
        for each in oldest:
            each.is_completed()

    def over(self, work: MpiWork) -> None:
        """It has ended."""
        with self._lock:
            self._works.pop(work, None)

    def end(self) -> None:
        """Frees the communicator when all calls are over; waits for none. Local in MPICH and Open MPI, though the
        standard calls it collective."""
        if not self._freed():
            threading.Thread(target=self._see_to_the_rest, name="shoal-mpi", daemon=True).start()

    def _see_to_the_rest(self) -> None:
        while not self._freed():
            time.sleep(LEFT_SLEEP_S)

    def _freed(self) -> bool:
        """Whether nothing is left to do, now."""
        if self._mpi.Is_finalized():
            return True
        with self._lock:
            works = list(self._works)
        over = [work.is_completed() for work in works]  # each is asked
        if not all(over):
            return False
        self._communicator.Free()
        return True


class MpiWork(dist.Work):
    """`outputs` are the tensors that the call writes; `held` are all that must live until it is over; then `finish`."""

    def __init__(
        self, request: Any, under_way: UnderWay, *, what: str, timeout_s: float, outputs: Sequence[Tensor],
        held: object, finish: Sequence[Callable[[], object]],
    ) -> None:  # fmt: skip
        super().__init__()
        self._request, self._under_way, self._what, self._timeout_s = request, under_way, what, timeout_s
        self._outputs, self._held, self._finish = list(outputs), held, list(finish)
        self._asking, self._over = threading.Lock(), False
        self._error: RuntimeError | None = None
        under_way.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises `RuntimeError` with what went wrong, or after the timeout."""
        limit_s = timeout.total_seconds() if timeout else self._timeout_s  # c10d says zero where it means none
        until_s, spins, sleep_s = time.monotonic() + limit_s, SPINS, FIRST_SLEEP_S
        while not self.is_completed():
            if spins > 0:
                spins -= 1
                os.sched_yield()
                continue
            if time.monotonic() >= until_s:
                raise RuntimeError(f"Timed out after {limit_s:g} s waiting for {self._what} over MPI")
            time.sleep(sleep_s)
            sleep_s = min(LONGEST_SLEEP_S, 2 * sleep_s)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Also goes on with the call. One thread at a time asks for it."""
        if not self._over and self._asking.acquire(blocking=False):
            try:
                self._ask()
            finally:
                self._asking.release()
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Completed with the tensors that the call wrote; waits for them."""
        future: torch.futures.Future = torch.futures.Future()
        self.wait()
        future.set_result(self._outputs)
        return future

    def _ask(self) -> None:
        try:
            if self._over or not self._request.Test():
                return
            for finish in self._finish:
                finish()
        except RuntimeError as error:  # kept for the one who waits
            self._error = error
        self._held, self._finish, self._over = None, [], True  # the tensors are the caller's again
        self._under_way.over(self)


# `MpiGroup`: the process group of CPU ranks over an MPI communicator.
#
# Every call is a non-blocking one of MPI, so that several may be under way; all ranks must make them in the same order.
# Sums are MPI's: the same bits in every run on the same ranks (MPI-4.1, section 6.9.1, advises so). To open a group,
# the ranks tell each other their numbers in MPI's world through the store.


# pyright: reportIncompatibleMethodOverride=false
# The stubs of ProcessGroup list several overloads under one name; these are the forms that backends implement.


class MpiGroup(dist.ProcessGroup):
    """`mpi` is mpi4py's module, `communicator` one that nobody else uses; it is freed when the group is shut down or
    dropped, and what was begun is over. Tensors may be of any strides."""

    def __init__(self, mpi: Any, communicator: Any, *, timeout_s: float) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())  # pyright: ignore[reportCallIssue]
        self._mpi, self._communicator, self._timeout_s = mpi, communicator, timeout_s
        self._under_way = UnderWay(mpi, communicator)
        self._end = weakref.finalize(self, self._under_way.end)
        self._end.atexit = False  # MPI ends with the process

    def getBackendName(self) -> str:
        return "mpi"

    def shutdown(self) -> None:
        """Returns at once; calls that were made are still carried out."""
        self._end()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts, tensor = opts or c10d.AllreduceOptions(), _one(tensors)
        numbers, op = numbers_of(tensor), operation(self._mpi, opts.reduceOp, tensor.dtype)
        request = self._communicator.Iallreduce(self._mpi.IN_PLACE, added(self._mpi, numbers), op)
        finish = self._taking(tensor, numbers, opts.reduceOp)
        return self._work(request, "all_reduce", [tensor], numbers, finish)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        opts, tensor = opts or c10d.ReduceOptions(), _one(tensors)
        numbers, op = numbers_of(tensor), operation(self._mpi, opts.reduceOp, tensor.dtype)
        mine, is_root = added(self._mpi, numbers), self.rank() == opts.rootRank
        ends = (self._mpi.IN_PLACE, mine) if is_root else (mine, None)
        request = self._communicator.Ireduce(*ends, op, opts.rootRank)
        finish = self._taking(tensor, numbers, opts.reduceOp) if is_root else []
        return self._work(request, "reduce", [tensor], numbers, finish)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        _check_blocks("reduce_scatter", input, output, self.size())
        numbers, op = numbers_of(input), operation(self._mpi, opts.reduceOp, input.dtype)
        part = numbers.new_empty(output.numel())
        source = added(self._mpi, numbers, blocks=self.size())
        request = self._communicator.Ireduce_scatter_block(source, added(self._mpi, part), op)
        finish = self._taking(output, part, opts.reduceOp)
        return self._work(request, "reduce_scatter", [output], (numbers, part), finish)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts, tensor = opts or c10d.BroadcastOptions(), _one(tensors)
        flat, finish = _writable(tensor, content=True)
        request = self._communicator.Ibcast(moved(self._mpi, flat), opts.rootRank)
        return self._work(request, "broadcast", [tensor], flat, finish)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        _check_blocks("all_gather", output, input, self.size())
        flat, finish = _writable(output)
        own = input.detach().contiguous()
        request = self._communicator.Iallgather(moved(self._mpi, own), moved(self._mpi, flat, blocks=self.size()))
        return self._work(request, "all_gather", [output], (own, flat), finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        whole, finish = _joined(outputs[0])
        own = _one(inputs).detach().contiguous()
        request = self._communicator.Iallgather(moved(self._mpi, own), moved(self._mpi, whole, blocks=self.size()))
        return self._work(request, "all_gather", outputs[0], (own, whole), finish)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        flat, finish = _writable(output)
        own, n = input.detach().contiguous(), self.size()
        send, receive = _byte_counts(own, in_sizes, n), _byte_counts(flat, out_sizes, n)
        request = self._communicator.Ialltoallv(_runs(self._mpi, own, send), _runs(self._mpi, flat, receive))
        return self._work(request, "all_to_all", [output], (own, flat), finish)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts, own = opts or c10d.GatherOptions(), _one(inputs).detach().contiguous()
        is_root = self.rank() == opts.rootRank
        whole, finish = _joined(outputs[0]) if is_root else (None, [])
        target = None if whole is None else moved(self._mpi, whole, blocks=self.size())
        request = self._communicator.Igather(moved(self._mpi, own), target, opts.rootRank)
        return self._work(request, "gather", outputs[0] if is_root else [], (own, whole), finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts, output = opts or c10d.ScatterOptions(), _one(outputs)
        flat, finish = _writable(output)
        whole = _joined(inputs[0], content=True)[0] if self.rank() == opts.rootRank else None
        source = None if whole is None else moved(self._mpi, whole, blocks=self.size())
        request = self._communicator.Iscatter(source, moved(self._mpi, flat), opts.rootRank)
        return self._work(request, "scatter", [output], (whole, flat), finish)

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        own = _one(tensors).detach().contiguous()
        return self._work(self._communicator.Isend(moved(self._mpi, own), dstRank, tag), "send", [], own, [])

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        tensor = _one(tensors)
        flat, finish = _writable(tensor)
        request = self._communicator.Irecv(moved(self._mpi, flat), srcRank, tag)
        return self._work(request, "recv", [tensor], flat, finish)

    def barrier(self, opts: Any = None) -> Any:
        return self._work(self._communicator.Ibarrier(), "barrier", [], None, [])

    def _taking(self, tensor: Tensor, numbers: Tensor, reduce_op: Any) -> list[Callable[[], object]]:
        """Puts a result where it belongs; `numbers` has its own dtype and is flat or of the tensor's shape."""

        def take() -> None:
            whole = numbers / self.size() if reduce_op == dist.ReduceOp.AVG else numbers
            tensor.data.copy_(whole.view(tensor.shape))  # as with Gloo, autograd does not count this as a change

        return [take]

    def _work(
        self, request: Any, what: str, outputs: Sequence[Tensor], held: object, finish: list[Callable[[], object]]
    ) -> MpiWork:
        return MpiWork(
            request, self._under_way, what=what, timeout_s=self._timeout_s, outputs=outputs, held=held, finish=finish
        )


def _one(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"MPI's transport takes one tensor a call, not {len(tensors)}; call once for each")
    return tensors[0]


def _writable(tensor: Tensor, *, content: bool = False) -> tuple[Tensor, list[Callable[[], object]]]:
    """Contiguous memory for `tensor`, and what puts it into place where it is not the tensor's own."""
    if tensor.is_contiguous():
        return tensor, []
    flat = tensor.detach().contiguous() if content else tensor.new_empty(tensor.shape)
    return flat, [lambda: tensor.data.copy_(flat)]


def _joined(tensors: Sequence[Tensor], *, content: bool = False) -> tuple[Tensor, list[Callable[[], object]]]:
    """One run of memory for equal tensors, and what deals it out."""
    whole = tensors[0].new_empty((len(tensors), *tensors[0].shape))
    if content:
        for row, tensor in zip(whole, tensors, strict=True):
            row.copy_(tensor)

    def deal() -> None:
        for row, tensor in zip(whole, tensors, strict=True):
            tensor.data.copy_(row)

    return whole, [deal]


def _byte_counts(tensor: Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Of each rank's part: of dim 0, equal where no sizes are given."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes and rows % ranks:
        raise ValueError(f"all_to_all of {rows} rows over {ranks} ranks: give sizes, or a multiple of the ranks")
    counts = list(sizes) or [rows // ranks] * ranks
    if len(counts) != ranks or sum(counts) != rows:
        raise ValueError(f"all_to_all of {rows} rows over {ranks} ranks: sizes {counts} do not add up")
    return [count * (tensor.nbytes // rows) if rows else 0 for count in counts]


def _runs(mpi: Any, tensor: Tensor, counts: list[int]) -> list[Any]:
    """Bytes in runs of these lengths, one behind the other."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), (counts, starts), mpi.BYTE]


def _check_blocks(operation: str, whole: Tensor, block: Tensor, ranks: int) -> None:
    if whole.numel() != block.numel() * ranks or whole.dtype != block.dtype:
        raise ValueError(f"{operation} of blocks of {block.numel()} and {whole.numel()} in all among {ranks} ranks")


def share_mpi(store: Store, rank: int, size: int, *, timeout_s: float) -> MpiGroup:
    """Blocks until all ranks of the group have called it."""
    mpi = load_mpi()
    mine = str(mpi.COMM_WORLD.Get_rank())
    answers = Board(store, timeout_s=timeout_s).all_gather("mpi", mine, rank=rank, ranks=range(size))
    return MpiGroup(mpi, communicator([int(answer) for answer in answers]), timeout_s=timeout_s)
