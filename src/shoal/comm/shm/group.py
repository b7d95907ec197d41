"""Choosing how CPU ranks of one host share memory; and `ShmGroup`, the way without a compiler.

The core in C takes all operations (`core_group`). Without it, `ShmGroup` takes large all-reduces on torch's kernels.

What else is asked of it goes to the Gloo group that it is given. Which way a call goes follows from its dtype, size and
operation alone: these are equal on all ranks, so the ranks always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.collective import Reduction
from shoal.comm.diagnosis import introduce
from shoal.comm.shm.core import CoreMissing, core_identity, load_core
from shoal.comm.shm.core_group import CoreGroup
from shoal.comm.shm.host import Apart, HostMates, find_mates
from shoal.comm.shm.meeting import Meeting
from shoal.comm.shm.segment import map_segment
from shoal.comm.shm.transport import CoreSegment, Transport, core_settings
from shoal.comm.shm.two_shot import SEGMENT_BYTES, TwoShot
from shoal.comm.worker import Worker

MINIMUM_BYTES = 1 << 18
_MISSING = "missing: "

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)


def share_core(inner: Any, store: Store, *, timeout_s: float, prompt: bool = False) -> CoreGroup:
    """`inner`, of two ranks or more, behind the core in C. Blocks until all ranks of the group have called it.

    Raises `CoreMissing` or `Apart` with the reason why not, on all ranks alike. `prompt`: see `Transport`.
    """
    rank, size = inner.rank(), inner.size()
    _check_core(store, rank, size, timeout_s=timeout_s)
    core, settings = load_core(), core_settings(size, timeout_s=timeout_s)
    segment_bytes, map_core_segment = core.shoal_segment_bytes(size, settings), partial(CoreSegment, core)
    mates = find_mates(
        store, rank, size, segment_bytes=segment_bytes, map_segment=map_core_segment, timeout_s=timeout_s
    )  # fmt: skip
    return CoreGroup(inner, Transport(core, mates, rank=rank, settings=settings, prompt=prompt))


def share_memory(inner: Any, store: Store, *, timeout_s: float, with_core: bool = True) -> tuple[Any, str]:
    """`inner` behind shared memory where all its ranks are on one host, else as it is; and why, for people.

    Blocks until all ranks of the group have called it. All get the same. `with_core=False`: on torch's kernels.
    """
    rank, size = inner.rank(), inner.size()
    if size == 1:
        return inner, "gloo: one rank alone"
    missing = "it was not asked for"
    try:
        if with_core:
            return share_core(inner, store, timeout_s=timeout_s), f"shared memory: {size} ranks on one host"
    except CoreMissing as reason:
        missing = str(reason)
    except Apart as reason:
        return inner, f"gloo: {reason}"
    try:
        mates = find_mates(
            store, rank, size, segment_bytes=SEGMENT_BYTES, map_segment=map_segment, timeout_s=timeout_s
        )  # fmt: skip
    except Apart as reason:
        return inner, f"gloo: {reason}"
    why = f"shared memory without the core in C ({missing}): {size} ranks on one host"
    return ShmGroup(inner, mates, timeout_s=timeout_s), why


def _check_core(store: Store, rank: int, size: int, *, timeout_s: float) -> None:
    """Raises `CoreMissing` on all ranks where one of them has no core, or another one."""
    try:
        mine = core_identity()
    except CoreMissing as error:
        mine = f"{_MISSING}rank {rank}: {error}"
    answers = introduce(PrefixStore("shm/core", store), rank, size, myself=mine, timeout_s=timeout_s)
    if missing := next((a for a in answers if a.startswith(_MISSING)), None):
        raise CoreMissing(missing.removeprefix(_MISSING))
    if len(set(answers)) > 1:
        raise CoreMissing("the ranks have different versions of it")


class ShmGroup:
    """A rank's side of a group of processes of one host. Ends when it is closed or dropped, after what was begun."""

    def __init__(self, inner: Any, mates: HostMates, *, timeout_s: float) -> None:
        self._inner = inner
        meeting = Meeting(mates.streams, timeout_s=timeout_s)
        self._two_shot = TwoShot(mates.segments, inner.rank(), meeting)
        self._worker = Worker(meeting.close, name="shoal-shm")

    def __getattr__(self, name: str) -> Any:
        """Any other operation is Gloo's. Forwarded by name, because c10d's names differ between torch versions."""
        return getattr(self._inner, name)

    def rank(self) -> int:
        return self._inner.rank()

    def size(self) -> int:
        return self._inner.size()

    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Any:
        """Returns at once; the tensor is the group's until `wait` of what is returned comes back."""
        op = _through_memory(tensors, opts)
        if op is None:
            return self._inner.allreduce(tensors, opts)
        run = partial(_all_reduce, self._two_shot, tensors[0], op)
        return self._worker.do(run, what="an all-reduce through shared memory", outputs=tensors)

    def close(self) -> None:
        """Ends the group when the calls that were made are done."""
        self._worker.close()

    def shutdown(self) -> None:
        """`close`, by c10d's name; Gloo's side ends too."""
        self.close()
        self._inner.shutdown()


def _through_memory(tensors: Sequence[Tensor], opts: c10d.AllreduceOptions) -> Reduction | None:
    """The reduction, where the call is one for shared memory."""
    first = tensors[0]
    if len(tensors) != 1 or first.dtype not in (*_FLOATS, *_INTEGERS) or first.layout is not torch.strided:
        return None
    if first.device.type != "cpu" or first.numel() * first.element_size() < MINIMUM_BYTES:
        return None
    return next((op for kind, op in _REDUCTIONS if opts.reduceOp == kind), None)


def _all_reduce(two_shot: TwoShot, tensor: Tensor, op: Reduction) -> None:
    tensor = tensor.data  # as with Gloo, autograd does not count this as a change
    flat = tensor.contiguous().view(-1)
    two_shot.all_reduce(flat, op)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
