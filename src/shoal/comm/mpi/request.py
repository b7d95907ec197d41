"""Calls under way in MPI, and tensors as MPI takes them.

Data that only moves is passed as bytes, in any dtype. MPI has no 16-bit floats: they are widened to float32, reduced
and rounded once, which sends twice the bytes. Means are sums, divided at the end.

`MpiWork` is one call; `UnderWay` keeps a group's calls alive until they are over. MPI makes progress only while it is
asked how far it is. The waiting thread asks, spins briefly, and then sleeps longer and longer between two questions,
because ranks may outnumber cores; MPI's own wait would keep a core busy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
