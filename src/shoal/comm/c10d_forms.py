"""What Shoal's process groups share: PyTorch's forms of a call, works of several calls, and opening a Gloo group."""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch._C._dynamo.eval_frame import (
    _FrameAction,  # pyright: ignore[reportAttributeAccessIssue]
    _FrameExecStrategy,  # pyright: ignore[reportAttributeAccessIssue]
    set_code_exec_strategy,  # pyright: ignore[reportAttributeAccessIssue]
)

from shoal.comm.board import GRACE_S, Board, bounded
from shoal.errors import CollectiveError

_WORKS_KEPT, _SMALL_BYTES = 64, 64

profiler_enabled = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateImportUsage]


def ranged(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A group's method whose calls PyTorch's profiler shows as `shoal:OPERATION`; else they cost a look more."""

    def decorate(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            if not profiler_enabled():
                return call(self, *arguments, **options)
            with torch.autograd.profiler.record_function(f"shoal:{operation}"):
                return call(self, *arguments, **options)

        return method

    return decorate


def listed(tensors: Any) -> list[Tensor]:
    """One tensor, or several, as c10d may give either."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def given_timeout_s(opts: Any) -> float | None:
    """Of the options of a call; None where it has none of its own."""
    given_s = 0.0 if opts is None else opts.timeout.total_seconds()
    return given_s if given_s > 0 else None  # c10d says -1 ms


def checked_root(root: int, size: int) -> int:
    """`root`, a rank of a group of `size`. Raises `ValueError` where the group has no such rank."""
    if not 0 <= root < size:
        raise ValueError(f"root {root} is outside a group of {size} ranks: it must be from 0 to {size - 1}")
    return root


def check_blocks(output: Tensor, blocks: Sequence[Tensor], *, rank: int, size: int) -> None:
    """Of a reduce-scatter of lists, whose blocks may differ in size: one for each rank, this rank's as `output`.

    Raises `ValueError`.
    """
    if len(blocks) != size:
        raise ValueError(f"reduce_scatter: {len(blocks)} tensors for {size} ranks; give one for each")
    own, other = blocks[rank], next((block.dtype for block in blocks if block.dtype != output.dtype), None)
    if own.numel() != output.numel():
        raise ValueError(
            f"reduce_scatter: rank {rank} has room for {output.numel()} elements, and its block has {own.numel()}; "
            "give an output of the block's size"
        )
    if other is not None:
        raise ValueError(f"reduce_scatter: a block is of {other}, the output of {output.dtype}; give one dtype")


class JoinedWork(dist.Work):
    """Several works of one call."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future:
        whole: torch.futures.Future = torch.futures.collect_all([work.get_future() for work in self._works])
        return whole.then(lambda futures: [tensor for future in futures.value() for tensor in future.value()])


def joined(works: Sequence[Any]) -> Any:
    """One work for all that are not over; None where all are."""
    left = [work for work in works if work is not None]
    if works and not left:
        return None
    return left[0] if len(works) == 1 else JoinedWork(left)


class SpreadWork(JoinedWork):
    """`work` writes `whole` `[numbers]`; when it is over its parts are copied, one after the other, into `outputs`."""

    def __init__(self, work: Any, whole: Tensor, outputs: Sequence[Tensor]) -> None:
        super().__init__([work])
        self._whole, self._outputs, self._copied = whole, outputs, False

    def wait(self, timeout: Any = None) -> bool:
        done = super().wait(timeout)
        self._spread()
        return done

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future:
        return super().get_future().then(lambda _: self._spread())

    def _spread(self) -> list[Tensor]:
        if not self._copied:
            parts = self._whole.split([each.numel() for each in self._outputs])
            for output, part in zip(self._outputs, parts, strict=True):
                output.copy_(part.view(output.shape))
            self._copied = True
        return list(self._outputs)


class LimitedWork(dist.Work):
    """`work`, whose wait takes `limit` at most where it is given no other."""

    def __init__(self, work: Any, limit: timedelta) -> None:
        super().__init__()
        self._work, self._limit = work, limit

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait(timeout or self._limit)  # c10d says zero where it means none

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future:
        return self._work.get_future()

    def _source_rank(self) -> int:
        return self._work._source_rank()


class SmallWorks:
    """The last works that wrote a few numbers each. They live on when they are over.

    C++ may hold the only reference to a work that Python made: DDP's `join` keeps the work of one number in each
    forward, waits for it in the backward and then asks for its future. Without its Python half a work has none:
    "getFuture not implemented" (torch 2.13). Python cannot see whether C++ still holds a work. One of a few
    numbers is cheap to keep, and many of them may come between forward and backward.
    """

    def __init__(self) -> None:
        self._works: deque[dist.Work] = deque(maxlen=_WORKS_KEPT)

    def keep(self, work: dist.Work, outputs: Sequence[Tensor]) -> None:
        """Keeps `work`, which writes `outputs`, if they are small."""
        if len(outputs) == 1 and outputs[0].nbytes <= _SMALL_BYTES and _is_small(outputs[0]):
            self._works.append(work)

    def clear(self) -> None:
        """Keeps none of them any longer."""
        self._works.clear()


def _is_small(tensor: Tensor) -> bool:
    """Also the memory that it is a part of."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() <= _SMALL_BYTES


class GlooGroup(dist.ProcessGroupGloo):
    """A Gloo group that tells the groups built on it when PyTorch sets another timeout (`_set_pg_timeout`), and keeps
    to it for messages too: Gloo waits for those as long as it was told when it was made."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, lazy: bool = False) -> None:
        if lazy:
            super().__init__(store, rank, size, _lazy_options(timeout))
        else:
            super().__init__(store, rank, size, timeout)
        self._followers: list[Callable[[float], object]] = []
        self._limit: timedelta | None = None

    def follow_timeout(self, follower: Callable[[float], object]) -> None:
        """`follower(seconds)` is called for each timeout that is set from now on."""
        self._followers.append(follower)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self._limit = timeout
        for follower in self._followers:
            follower(timeout.total_seconds())

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        return self._limited(super().send(tensors, dstRank, tag))  # pyright: ignore[reportAttributeAccessIssue]

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        return self._limited(super().recv(tensors, srcRank, tag))  # pyright: ignore[reportAttributeAccessIssue]

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._limited(super().recv_anysource(tensors, tag))  # pyright: ignore[reportAttributeAccessIssue]

    def _limited(self, work: Any) -> Any:
        return work if self._limit is None else LimitedWork(work, self._limit)


def _lazy_options(timeout: timedelta) -> Any:
    """Of a Gloo group that connects two ranks when they first speak. The interface is chosen as c10d chooses it.

    Each group has devices of its own: a lazy one numbers connections by rank, so that those of two groups which share
    it are taken for each other.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs lack what it needs here
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in interfaces]
    options._devices = options._devices or [gloo.create_default_device(lazy_init=True)]
    return options


def open_gloo(store: Store, rank: int, size: int, *, timeout_s: float, lazy: bool = False) -> Any:
    """A Gloo group over connections that its ranks find through `store`. Blocks until all have called it.

    `timeout_s` bounds this and every call of the group. `lazy`: two ranks connect when they first speak.
    Raises `CollectiveError` where a rank does not come, or the store goes: Gloo itself would go on waiting for a rank
    that has ended since it told its address.
    """
    limit = timedelta(seconds=timeout_s)
    board = Board(store, timeout_s=timeout_s)
    try:
        return bounded(
            lambda: GlooGroup(store, rank, size, limit, lazy=lazy),
            timeout_s=timeout_s + GRACE_S,
            look=lambda: board.published("given up"),
        )
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} of a group of {size} could not connect to the others over Gloo within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}): a rank has ended, or a firewall or GLOO_SOCKET_IFNAME keeps them apart"
        ) from None


# A future of tensors that PyTorch's C++ can read.
#
# A future that Python makes holds a Python object. C++ that asks for a list of tensors fails on it: DDP's built-in
# float16 hook does (`result.isTensorList() INTERNAL ASSERT FAILED`, torch 2.13). TorchScript's futures hold what their
# type says, so a function of TorchScript waits for the Python one and then gives the tensors that the call has written.
#
# It takes two changes of threads, some 90 us. That is for float16 alone, in which the hook sends.


_SOURCE = """
def when(done: Future[Tensor], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def typed(done: Future[Tensor], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(when, done, tensors)
"""


def readable(future: torch.futures.Future, outputs: Sequence[Tensor]) -> torch.futures.Future:
    """`future`, which says that a call has written `outputs`, or one that C++ can read too and that ends like it."""
    if len(outputs) != 1 or outputs[0].dtype != torch.float16:
        return future
    return _script().typed(future.then(_value), list(outputs))


def _value(future: torch.futures.Future) -> Any:
    """In a callback of `then` an error becomes one of C++'s; that of a Python future is a Python object, too."""
    return future.value()


@functools.cache
def _script() -> Any:
    return torch.jit.CompilationUnit(_SOURCE)


# What `torch.compile` leaves alone: Python that C++ calls in the middle of a compiled program.
#
# Dynamo looks at every Python frame that begins while a compiled program runs, and a process group written in Python
# has such frames: C++ calls its methods from DDP's forward, c10d makes it inside of `new_group`. Dynamo cannot trace
# them: it refuses a group's own attributes (they are not registered with its opaque type), and a group whose C++ half
# does not exist yet, as in `__init__`, ends the process (torch 2.13). There is nothing to gain either: no tensor
# operation is in them.
#
# `torch.compiler.disable` does the same around a call. It imports Dynamo, 3 s, and makes each call slower; a strategy
# of the code object costs nothing where nothing is compiled.


Untraced = TypeVar("Untraced", bound=Callable[..., object])

_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the frame, and those that it begins


def untraced(what: Untraced) -> Untraced:
    """A function, or a class with all methods of its own, which Dynamo runs as they are, with all that they call."""
    for function in _functions_of(what):
        set_code_exec_strategy(function.__code__, _AS_IT_IS)
    return what


def _functions_of(what: object) -> Iterator[FunctionType]:
    for one in vars(what).values() if isinstance(what, type) else [what]:
        function = one.fget if isinstance(one, property) else one
        if isinstance(function, FunctionType):
            yield function


# A barrier that names who does not come, as c10d's `monitored_barrier`, through the group's store.
#
#     every rank   publishes that it is here
#     rank 0       waits for the others, then publishes who did not come
#
# Gloo's own speaks over its connections. Where two ranks have not spoken yet, one of them waits for its connection
# first, as long as the group's timeout, whatever the barrier's is (torch 2.13). And a barrier that fails breaks no
# connection here: collectives go on.


LOOK_S = 0.01


class MonitoredBarrier:
    """Of a group of `size` ranks. All ranks wait equally often, and no two at the same time on one rank."""

    def __init__(self, board: Board, *, rank: int, size: int) -> None:
        self._board, self._rank, self._size, self._number = board, rank, size, 0

    def wait(self, limit: timedelta, *, all_ranks: bool = False) -> None:
        """Blocks until all ranks are here.

        Raises `RuntimeError` where one is not within `limit`: on rank 0 with its number, or, with `all_ranks`, with
        the numbers of all that are missing; on the others that rank 0 knows more.
        """
        number, self._number = self._number, self._number + 1
        if self._rank == 0:
            self._wait_for_all(number, limit, all_ranks=all_ranks)
        else:
            self._wait_for_word(number, limit)

    def _wait_for_all(self, number: int, limit: timedelta, *, all_ranks: bool) -> None:
        keys = {f"{number}/{rank}": rank for rank in range(1, self._size)}
        missing = [keys[key] for key in self._missing(list(keys), limit)]
        self._board.publish(f"{number}/missing", " ".join(map(str, missing)))
        if missing:
            raise RuntimeError(_sentence(missing if all_ranks else missing[:1], limit, came=len(keys) - len(missing)))
        self._board.forget([*keys, f"{number - 1}/missing"])  # which all have read: they are here

    def _wait_for_word(self, number: int, limit: timedelta) -> None:
        self._board.publish(f"{number}/{self._rank}", "")
        key = f"{number}/missing"
        word = None if self._missing([key], limit) else self._board.collect([key])[0].decode()
        if word != "":
            said = "rank 0 has not come" if word is None else f"rank 0 missed rank {word}"
            raise RuntimeError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but {said} within {_ms(limit)} ms. Please "
                "check rank 0 logs for faulty rank."
            )

    def _missing(self, keys: list[str], limit: timedelta) -> list[str]:
        """Those of `keys` that are not published within `limit`. It looks itself: a store of a file would sleep for a
        second in each wait (torch 2.13)."""
        end_s = time.monotonic() + limit.total_seconds()
        while (keys := [key for key in keys if not self._board.published(key)]) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return keys


def _sentence(missing: list[int], limit: timedelta, *, came: int) -> str:
    """In c10d's words, which users and their scripts look for."""
    ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return (
        f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {_ms(limit)} ms (Rank 0 timed out in monitoredBarrier "
        f"after {_ms(limit)} ms; {came} other ranks reached it)"
    )


def _ms(limit: timedelta) -> int:
    return round(1e3 * limit.total_seconds())
