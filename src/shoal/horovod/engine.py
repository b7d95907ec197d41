"""`Engine`: a thread that carries out the calls which all ranks have begun, while others compute.

Small all-reduces that are ready together go as one vector, up to HOROVOD_FUSION_THRESHOLD bytes (64 MiB). Tensors on
the CPU go over `shoal.wire`, those on a GPU over NCCL, those on another device by way of the CPU. bfloat16 on the CPU
is summed in float32 and rounded once. A mean of float16 whose sum overflows is summed once more in float32.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.comm.exchanges.adasum import adasum
from shoal.errors import CollectiveError, ShoalError, UsageError
from shoal.horovod.negotiation import WORDS, Begun, Kind, Word, conflict, fused, missing, ready
from shoal.horovod.timeline import Timeline
from shoal.wire import Group

CYCLE_S = 0.001
"""How long a rank waits after a round in which no call was ready."""
WORD_BYTES = 1 << 14
STALL_CHECK, STALL_SHUTDOWN = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
STALL_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
_STALL_S, _LATE_S = 60.0, 5.0


class HorovodInternalError(CollectiveError):
    """A rank was lost in the middle of a call."""


@dataclass(eq=False)
class Handle:
    """A call under way; `synchronize` waits for its result."""

    begun: Begun
    tensors: list[Tensor]
    future: Future[Any] = field(default_factory=Future)
    begin_s: float = field(default_factory=time.perf_counter)
    undo: Callable[[Any], Any] = lambda result: result
    missing: Callable[[str], str] = lambda name: "other ranks have not begun it"

    def wait(self) -> Any:
        """Its result. Says every minute (HOROVOD_STALL_CHECK_TIME_SECONDS) that it is still waited for, and for whom;
        raises what went wrong, and `HorovodInternalError` after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, if there are any;
        neither where HOROVOD_STALL_CHECK_DISABLE is 1.
        """
        if os.environ.get(STALL_DISABLE, "0") == "1":
            return self.undo(self.future.result())
        look_s, most_s, waited_s = number_of(STALL_CHECK) or _STALL_S, number_of(STALL_SHUTDOWN), 0.0
        while True:
            try:
                return self.undo(self.future.result(look_s))
            except TimeoutError:
                if self.future.done():
                    raise
            waited_s += look_s
            line = f"{self.begun.name} has waited for {waited_s:g} s: {self.missing(self.begun.name)}"
            if 0 < most_s <= waited_s:
                raise HorovodInternalError(f"{line}; {STALL_SHUTDOWN} is {most_s:g}")
            print(line + "\n", end="", flush=True)  # with its end: ranks that share a terminal write at once


def number_of(
    name: str, default: float = 0.0, *, unit: str = "seconds", environ: Mapping[str, str] = os.environ
) -> float:
    """Of a variable of the environment; `default` where it is not set. Raises `UsageError` for what is no number from 0
    on.
    """
    if not (given := environ.get(name)):
        return default
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"{name} is {given!r}: give {unit}, a number from 0 on")
    return number


class Engine:
    """Over `group`, whose only user it is. `gpu` gives the group of ranks for tensors on GPUs."""

    def __init__(self, group: Group, *, fusion_bytes: int, gpu: Callable[[], Any], timeline: Timeline) -> None:
        self.group, self._fusion_bytes, self._gpu, self.timeline = group, fusion_bytes, gpu, timeline
        self._pending: dict[str, Handle] = {}
        self._unnamed: Counter[Kind] = Counter()
        self._changed = threading.Condition()
        self._join: Future[int] | None = None
        self._order: list[int] = []  # ranks that have joined, the first one first
        self._words, self._round_s = list[Word](), 0.0  # of the last round that is over, and when this one began
        self._over = False
        self.failure: ShoalError | None = None
        self._thread = threading.Thread(target=self._work, name="shoal-horovod", daemon=True)
        self._thread.start()

    def next_name(self, kind: Kind) -> str:
        """For a call without a name: ranks number them alike."""
        self._unnamed[kind] += 1
        return f"noname.{self._unnamed[kind]}"

    def submit(self, handle: Handle) -> Handle:
        """Begins a call. Raises `ValueError` for a name that is under way, and what ended the engine."""
        with self._changed:
            if self.failure is not None:
                raise self.failure
            if handle.begun.name in self._pending:
                raise ValueError(
                    f"a call of the name {handle.begun.name!r} is under way: wait for it, or name it otherwise"
                )
            self._pending[handle.begun.name] = handle
            handle.missing = self._missing
            self._changed.notify()
        return handle

    def join(self) -> int:
        """Takes part in the others' calls, with zeros, until all ranks have joined: the last rank that did."""
        with self._changed:
            self._join = Future()
            self._changed.notify()
        return self._join.result()

    def _missing(self, name: str) -> str:
        """Which ranks have not begun the call, and what they wait in instead."""
        late = time.perf_counter() - self._round_s > _LATE_S
        return missing(() if late else self._words, name)

    def close(self) -> None:
        """Ends the thread and the group; other ranks that wait for this one are told."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self.group.close()
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._join or self._over)
                if self._over:
                    return
                mine = tuple(handle.begun for handle in self._pending.values())
                joined = self._join is not None
            try:
                if not self._round(Word(mine, joined)):
                    time.sleep(CYCLE_S)
            except Exception as error:
                self._fail(error)
                return

    def _round(self, mine: Word) -> bool:
        """Whether anything was carried out."""
        self.timeline.cycle()
        self._round_s = time.perf_counter()
        self._words = words = self._exchange(mine)
        for rank, word in enumerate(words):
            if word.joined and rank not in self._order:
                self._order.append(rank)
        if all(word.joined for word in words):
            last, waiting, self._order = self._order[-1], self._join, []
            self._join = None
            if waiting is not None:
                waiting.set_result(last)
            return True
        names = ready(words)
        by_name = [{r: c for r, w in enumerate(words) for c in w.begun if c.name == name} for name in names]
        fitting = [calls for calls in by_name if not self._refused(calls)]
        self._carry_out(fitting)
        return bool(names)

    def _exchange(self, mine: Word) -> list[Word]:
        content = msgspec.msgpack.encode(mine)
        size, most = np.zeros(WORD_BYTES, np.uint8), WORD_BYTES - 8
        size[:8] = np.frombuffer(len(content).to_bytes(8, "big"), np.uint8)
        size[8 : 8 + min(len(content), most)] = np.frombuffer(content[:most], np.uint8)
        rows = self.group.all_gather(size)
        lengths = [int.from_bytes(row[:8].tobytes(), "big") for row in rows]
        if max(lengths) <= most:
            return [WORDS.decode(row[8 : 8 + n].tobytes()) for row, n in zip(rows, lengths, strict=True)]
        whole = np.zeros(max(lengths), np.uint8)
        whole[: len(content)] = np.frombuffer(content, np.uint8)
        rows = self.group.all_gather(whole)
        return [WORDS.decode(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def _refused(self, calls: dict[int, Begun]) -> bool:
        """Calls of one name that differ fail on all ranks, and nothing else does."""
        if (why := conflict(calls, self.group.size)) is None:
            return False
        if (handle := self._take(next(iter(calls.values())).name)) is not None:
            handle.future.set_exception(ValueError(why))
        return True

    def _carry_out(self, calls: Sequence[dict[int, Begun]]) -> None:
        firsts = [next(iter(each.values())) for each in calls]
        sizes = [sum(_bytes(dtype, shape) for dtype, shape in zip(c.dtypes, c.shapes, strict=True)) for c in firsts]
        for places in fused(firsts, most_bytes=self._fusion_bytes, sizes=sizes):
            handles = [self._take(firsts[place].name) for place in places]
            first = firsts[places[0]]
            with self.timeline.phase([firsts[place].name for place in places], first.kind.upper()):
                try:
                    self._one(first, [calls[place] for place in places], handles)
                except Exception as error:
                    why = HorovodInternalError(str(error)) if isinstance(error, CollectiveError) else error
                    for handle in handles:
                        if handle is not None and not handle.future.done():
                            handle.future.set_exception(why)
                    raise

    def _one(self, first: Begun, calls: Sequence[dict[int, Begun]], handles: Sequence[Handle | None]) -> None:
        """One collective: of a rank that has joined, handles are None."""
        tensors = [
            handle.tensors if handle is not None else _zeros(next(iter(each.values())))
            for handle, each in zip(handles, calls, strict=True)
        ]
        if first.kind == "allreduce":
            results: list[Any] = self._all_reduce(first, tensors)
        else:
            results = [getattr(self, f"_{first.kind}")(calls[0], first, tensors[0])]
        for handle, result in zip(handles, results, strict=True):
            if handle is not None:
                handle.future.set_result(result)

    def _all_reduce(self, call: Begun, groups: list[list[Tensor]]) -> list[list[Tensor]]:
        """Writes into the tensors, fused where they are several."""
        if call.op == "adasum":
            for tensors in groups:
                adaptive_sum(self.group, tensors, scale=call.prescale * call.postscale)
            return groups
        flat = [tensor for tensors in groups for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in flat):
            alike = [tensor for tensor in flat if tensor.dtype == dtype]
            whole = alike[0].reshape(-1) if len(alike) == 1 else torch.cat([tensor.reshape(-1) for tensor in alike])
            self._reduced(whole, call)
            if len(alike) > 1 or whole.data_ptr() != alike[0].data_ptr():
                pieces = whole.split([tensor.numel() for tensor in alike])
                for tensor, piece in zip(alike, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))
        return groups

    def _reduced(self, flat: Tensor, call: Begun) -> None:
        if call.prescale != 1.0:
            flat.mul_(call.prescale)
        op, size = ("sum", self.group.size) if call.op == "avg" else (call.op, 1)
        overflows = flat.dtype == torch.float16 and op == "sum" and call.postscale < size
        total = flat.clone() if overflows else flat
        self._over_ranks(total, op)
        if overflows and not total.isfinite().all():  # as on every other rank: all have the same sum
            total = flat.float()
            self._over_ranks(total, op)
        if size > 1:
            total.div_(size)
        if call.postscale != 1.0:
            total.mul_(call.postscale)
        flat.copy_(total)

    def _over_ranks(self, flat: Tensor, op: str) -> None:
        """Reduces it in place."""
        if flat.is_cuda:
            self._gpu().all_reduce(flat, op)
        elif flat.dtype == torch.bfloat16 or flat.device.type != "cpu":
            wide = flat.to("cpu", torch.float32 if flat.dtype == torch.bfloat16 else flat.dtype)
            self.group.all_reduce(wide.numpy(), op=op, out=wide.numpy())  # pyright: ignore[reportArgumentType]
            flat.copy_(wide)
        else:
            self.group.all_reduce(flat.numpy(), op=op, out=flat.numpy())  # pyright: ignore[reportArgumentType]

    def _reducescatter(self, calls: dict[int, Begun], call: Begun, tensors: list[Tensor]) -> list[Tensor]:
        """Rows are divided as evenly as can be, the lower ranks take one more."""
        self._all_reduce(call, [tensors])
        return [torch.tensor_split(tensor, self.group.size)[self.group.rank].clone() for tensor in tensors]

    def _allgather(self, calls: dict[int, Begun], call: Begun, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors may differ in their first dimension."""
        shapes = [calls[rank].shapes if rank in calls else None for rank in range(self.group.size)]
        found = []
        for place, tensor in enumerate(tensors):
            rows = [shape[place][0] if shape is not None else 0 for shape in shapes]
            pieces = self._exchanged(tensor, [tensor.shape[0]] * self.group.size, rows, same=True)
            found.append(pieces)
        return found

    def _alltoall(self, calls: dict[int, Begun], call: Begun, tensors: list[Tensor]) -> Any:
        me = self.group.rank
        rows = [calls[rank].splits[me] for rank in range(self.group.size)]
        return self._exchanged(tensors[0], calls[me].splits, rows, same=False), torch.tensor(rows)

    def _exchanged(self, tensor: Tensor, out_rows: Sequence[int], in_rows: Sequence[int], *, same: bool) -> Tensor:
        content = tensor.detach().cpu().contiguous()
        if content.dtype == torch.bfloat16:
            content = content.view(torch.int16)
        sent = [content] * len(out_rows) if same else list(content.split(list(out_rows)))
        came = torch.empty((sum(in_rows), *content.shape[1:]), dtype=content.dtype)
        self.group.exchange([s.numpy() for s in sent], [r.numpy() for r in came.split(list(in_rows))])
        return came.view(tensor.dtype).to(tensor.device)

    def _broadcast(self, calls: dict[int, Begun], call: Begun, tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            content = tensor.detach().cpu().contiguous()
            raw = content.reshape(-1).view(torch.uint8).numpy()
            self.group.broadcast(raw, root=call.root, out=raw)
            tensor.data.copy_(content)
        return tensors

    def _barrier(self, calls: dict[int, Begun], call: Begun, tensors: list[Tensor]) -> None:
        self.group.barrier()

    def _take(self, name: str) -> Handle | None:
        with self._changed:
            handle = self._pending.pop(name, None)
        if handle is not None:
            self.timeline.negotiated(name, handle.begin_s)
        return handle

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = HorovodInternalError(str(error)) if isinstance(error, CollectiveError) else None
            why: BaseException = self.failure or error
            self.failure = self.failure or ShoalError(str(error))
            handles, self._pending = list(self._pending.values()), {}
        for future in [handle.future for handle in handles] + ([self._join] if self._join else []):
            if not future.done():
                future.set_exception(why)


def adaptive_sum(group: Group, tensors: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """Adasum of the ranks' `tensors` (floating point, on the CPU), in place; the same bits on all ranks.

        adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b        for each tensor by itself

    (Maleki et al., "Scaling distributed training with adaptive summation", arXiv:2006.02924, equation 3): a sum of what
    is orthogonal, a mean of what is parallel. Over several ranks by recursive doubling (section 3.1); where they are no
    power of two, the last ones add theirs to the first ones' before it, and hear the result.
    """
    own = [(tensor.detach().double() * scale).reshape(-1) for tensor in tensors]
    whole = torch.cat(own) if own else torch.zeros(0, dtype=torch.float64)
    sizes, rank = [each.numel() for each in own], group.rank
    power = 1 << (group.size.bit_length() - 1)
    extra = group.size - power
    other = _swapped(group, whole, rank + power if rank < extra else rank - power if rank >= power else None)
    if rank < extra:
        whole = _adasum(whole, other, sizes)
    step = 1
    while step < power:
        partner = rank ^ step if rank < power else None
        other = _swapped(group, whole, partner)
        if partner is not None:
            whole = _adasum(*((whole, other) if rank < partner else (other, whole)), sizes)
        step *= 2
    other = _swapped(group, whole, rank + power if rank < extra else rank - power if rank >= power else None)
    whole = other if rank >= power else whole
    for tensor, piece in zip(tensors, whole.split(sizes), strict=True):
        tensor.data.copy_(piece.view(tensor.shape))


def _swapped(group: Group, own: Tensor, partner: int | None) -> Tensor:
    """The vector of `partner`, who gets `own`; all ranks call it, also those without one."""
    came = torch.empty_like(own)
    nothing = np.zeros(0, np.float64)
    sent = [own.numpy() if rank == partner else nothing for rank in range(group.size)]
    group.exchange(sent, [came.numpy() if rank == partner else nothing for rank in range(group.size)])
    return came


def _adasum(one: Tensor, other: Tensor, sizes: Sequence[int]) -> Tensor:
    pairs = zip(one.split(list(sizes)), other.split(list(sizes)), strict=True)
    return torch.cat([adasum(pair) for pair in pairs]) if sizes else one


def _zeros(call: Begun) -> list[Tensor]:
    """What a rank that has joined gives: zeros, or no rows."""
    device = torch.device("cuda", torch.cuda.current_device()) if call.device == "cuda" else torch.device("cpu")
    rows = call.kind == "allgather"
    return [
        torch.zeros((0, *shape[1:]) if rows else shape, dtype=getattr(torch, dtype), device=device)
        for dtype, shape in zip(call.dtypes, call.shapes, strict=True)
    ]


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape)) * getattr(torch, dtype).itemsize
