"""`Hierarchical`: the process group of CPU ranks on several hosts.

It has a shared-memory group inside every host, a Gloo group of the hosts' leaders, and a Gloo group of all ranks.
Operations that send less on two levels use the first two (`division` has the closed forms), all others the third;
messages inside a host go through its shared memory. The way of a call follows from its operation, dtype and reduction
alone, so the ranks always agree.

A thread carries out calls on two levels, in the order in which they were made. Sums of 16-bit floats are made in
float32 and rounded once inside a host and once between hosts.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.board import Board
from shoal.comm.c10d_forms import GlooGroup, check_blocks, checked_root, given_timeout_s, listed, open_gloo, ranged
from shoal.comm.collective import Alone, Collective, GroupCollective, Reduction
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart
from shoal.comm.two_levels import TWO_LEVELS, Division, TwoLevels, division_of
from shoal.comm.worker import Worker

# pyright: reportIncompatibleMethodOverride=false
# The stubs of ProcessGroup list several overloads under one name; these are the forms that backends implement.


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_NUMBERS = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_OPS: dict[Any, Reduction] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}


class Hierarchical(dist.ProcessGroup):
    """`flat` is a Gloo group of all ranks; `mates`, of this host's ranks in ascending order (None: it has one rank);
    `leaders`, a Gloo group of the hosts' first ranks (None on the others)."""

    def __init__(self, flat: Any, division: Division, *, mates: Any | None, leaders: Any | None) -> None:
        super().__init__(flat.rank(), flat.size())  # pyright: ignore[reportCallIssue]
        self.inner, self.division, self._mates, self._calls = flat, division, mates, 0
        inside: Collective = Alone() if mates is None else GroupCollective(mates)
        outside = None if leaders is None else GroupCollective(leaders)
        for follower in (leaders, getattr(mates, "inner", None)):
            _follow_timeout(flat, follower)
        # Held by the calls alone: when one has failed the groups are dropped, and the peers learn of it.
        self._levels = [TwoLevels(flat.rank(), division, inside, outside)]
        self._worker = Worker(self._levels.clear, name="shoal-hosts")
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, flat)

    @property
    def pending(self) -> int:
        """Calls that the thread has not begun."""
        return self._worker.pending

    def getBackendName(self) -> str:
        return "hierarchical"

    def shutdown(self) -> None:
        """Ends the group when the calls that were made are done."""
        self._worker.close()
        self._mates = None
        self.inner.shutdown()

    @ranged("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts, tensors = opts or c10d.AllreduceOptions(), listed(tensors)
        op = _reduction(tensors[0], opts.reduceOp)
        if op is None or len(tensors) != 1:
            return self.inner.allreduce(tensors, opts)
        divide_by = self._divisor(opts.reduceOp)
        return self._do(partial(_in_place, tensors[0], lambda flat, t: t.all_reduce(flat, op, divide_by)), tensors)

    @ranged("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        opts, tensors = opts or c10d.ReduceOptions(), listed(tensors)
        op, root = _reduction(tensors[0], opts.reduceOp), checked_root(opts.rootRank, self.size())
        if op is None or len(tensors) != 1:
            return self.inner.reduce(tensors, opts)
        run = partial(_reduced, tensors[0], op, root, self._divisor(opts.reduceOp), self.rank() == root)
        return self._do(run, tensors)

    @ranged("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts, tensors = opts or c10d.BroadcastOptions(), listed(tensors)
        if len(tensors) != 1 or not _is_plain(tensors[0]):
            return self.inner.broadcast(tensors, opts)
        root = checked_root(opts.rootRank, self.size())
        run = partial(_in_place, tensors[0], lambda flat, t: t.broadcast(flat.view(torch.uint8), root=root))
        return self._do(run, tensors)

    @ranged("all_gather")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(f"all_gather of {input.numel()} into {output.numel()} numbers: one block for each rank")
        return self._do(partial(_gathered, output, input), [output])

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)

    @ranged("reduce_scatter")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if input.numel() != output.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(f"reduce_scatter of {input.numel()} into {output.numel()} numbers: a block for each rank")
        op = _reduction(output, opts.reduceOp)
        if op is None:
            return self.inner._reduce_scatter_base(output, input, opts)
        return self._do(partial(_scattered, output, input, op, self._divisor(opts.reduceOp)), [output])

    @ranged("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        output, blocks = outputs[0], inputs[0]
        op = _reduction(output, opts.reduceOp)
        if op is None or len(outputs) != 1:
            return self.inner.reduce_scatter(outputs, inputs, opts)
        check_blocks(output, blocks, rank=self.rank(), size=self.size())
        run = partial(_scattered_blocks, output, list(blocks), op, self._divisor(opts.reduceOp), self.rank())
        return self._do(run, [output])

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(output, input, opts)

    @ranged("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.inner.allgather(outputs, inputs, opts or c10d.AllgatherOptions())

    @ranged("all_to_all")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        return self.inner.alltoall_base(output, input, list(out_sizes), list(in_sizes), opts or c10d.AllToAllOptions())

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        return self.all_to_all_single(output, input, out_sizes, in_sizes, opts)

    @ranged("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        checked_root(opts.rootRank, self.size())
        return self.inner.gather(outputs, inputs, opts)

    @ranged("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        checked_root(opts.rootRank, self.size())
        return self.inner.scatter(outputs, inputs, opts)

    @ranged("send")
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        group, peer = self._way_to(dstRank)
        return group.send(tensors, peer, tag)

    @ranged("recv")
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        group, peer = self._way_to(srcRank)
        return group.recv(tensors, peer, tag)

    @ranged("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        raise RuntimeError(
            "recv without a source in a group on several hosts: messages come through shared memory or over Gloo, and "
            "no receive can wait for both; name the source (src=RANK), or use a Gloo group"
        )

    @ranged("barrier")
    def barrier(self, opts: Any = None) -> Any:
        return self._do(lambda levels: levels.barrier(), [], timeout_s=given_timeout_s(opts))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        return self.inner.monitored_barrier(timeout, wait_all_ranks)

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on all ranks: there is nothing to agree on."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has made: ranks with other numbers have left each other."""
        return self._calls + self.inner._get_sequence_number_for_group()

    def _do(self, run: Callable[[TwoLevels], object], outputs: Sequence[Tensor], timeout_s: float | None = None) -> Any:
        self._calls += 1
        guarded = partial(_guarded, run, self._levels, self._mates)
        return self._worker.do(guarded, what="a call between hosts", outputs=outputs, timeout_s=timeout_s)

    def _way_to(self, rank: int) -> tuple[Any, int]:
        """The group that takes messages to and from `rank`, and its number there. Raises what broke this group."""
        if not 0 <= rank < self.size() or rank == self.rank():
            raise ValueError(f"rank {rank} is no peer of rank {self.rank()} in a group of {self.size()}")
        if (failure := self._worker.failure) is not None:
            raise copy.copy(failure)  # with its traceback it would hold this group
        host, place = self.division.places[rank]
        if self._mates is not None and host == self.division.places[self.rank()][0]:
            return self._mates, place
        return self.inner, rank

    def _divisor(self, reduce_op: Any) -> int:
        return self.size() if reduce_op == dist.ReduceOp.AVG else 1


def _follow_timeout(flat: Any, group: Any) -> None:
    """`group` gets each timeout that PyTorch sets on `flat`; it is not kept alive for that."""
    if isinstance(flat, GlooGroup) and isinstance(group, GlooGroup):
        ref = weakref.ref(group)
        flat.follow_timeout(lambda s: (it := ref()) and it._set_default_timeout(timedelta(seconds=s)))


def _guarded(run: Callable[[TwoLevels], object], levels: list[TwoLevels], mates: Any | None) -> None:
    """What fails between hosts fails inside them too, at once, and the other way round."""
    try:
        run(levels[0])
    except Exception as error:
        if mates is not None:
            mates.abort()
        raise error.with_traceback(None) from None  # its frames would keep the connections to other hosts open


def _in_place(tensor: Tensor, run: Callable[[Tensor, TwoLevels], None], levels: TwoLevels) -> None:
    tensor = tensor.data  # as with Gloo, autograd does not count this as a change
    if tensor.numel() == 0:
        return
    flat = tensor.contiguous().view(-1)
    run(flat, levels)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _reduced(tensor: Tensor, op: Reduction, root: int, divide_by: int, is_root: bool, levels: TwoLevels) -> None:
    def run(flat: Tensor, levels: TwoLevels) -> None:
        levels.reduce(flat, op, root=root)
        if is_root and divide_by != 1:
            flat.div_(divide_by)

    _in_place(tensor, run, levels)


def _gathered(output: Tensor, block: Tensor, levels: TwoLevels) -> None:
    block = block.detach().contiguous().view(-1).view(torch.uint8)

    def run(flat: Tensor, levels: TwoLevels) -> None:
        levels.all_gather(flat.view(torch.uint8), block)

    _in_place(output, run, levels)


def _scattered(output: Tensor, whole: Tensor, op: Reduction, divide_by: int, levels: TwoLevels) -> None:
    def run(flat: Tensor, levels: TwoLevels) -> None:
        levels.reduce_scatter(flat, whole.detach().clone(memory_format=torch.contiguous_format).view(-1), op)
        if divide_by != 1:
            flat.div_(divide_by)

    _in_place(output, run, levels)


def _scattered_blocks(
    output: Tensor, blocks: Sequence[Tensor], op: Reduction, divide_by: int, rank: int, levels: TwoLevels
) -> None:
    """Blocks of any sizes: each is reduced to its rank."""
    for root, block in enumerate(blocks):
        flat = block.detach().clone(memory_format=torch.contiguous_format).view(-1)
        if flat.numel() == 0:
            continue
        levels.reduce(flat, op, root=root)
        if root == rank:
            output.data.copy_((flat if divide_by == 1 else flat.div_(divide_by)).view(output.shape))


def on_two_levels(operation: str, tensors: Sequence[Tensor], reduce_op: Any) -> bool:
    """Whether a `Hierarchical` makes it so, rather than as Gloo; `reduce_op` is None where nothing is reduced."""
    return operation in TWO_LEVELS and (reduce_op is None or _reduction(tensors[0], reduce_op) is not None)


def _reduction(tensor: Tensor, reduce_op: Any) -> Reduction | None:
    """None where two levels have none for it."""
    if tensor.dtype not in _NUMBERS or not _is_plain(tensor):
        return None
    if reduce_op == dist.ReduceOp.AVG and tensor.dtype not in _FLOATS:
        return None
    return next((op for kind, op in _OPS.items() if reduce_op == kind), None)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu"


_NO = "no: "


def share_hosts(flat: Any, store: Store, *, hosts: Sequence[str], timeout_s: float) -> Hierarchical:
    """`flat`, a Gloo group, on two levels. `hosts` are the identities of its ranks' hosts, in rank order.

    Blocks until all ranks have called it. Raises `Apart` on all of them where those of one host cannot share memory.
    """
    division, rank = division_of(hosts), flat.rank()
    host, _ = division.places[rank]
    ranks = division.hosts[host]
    mates, refusal = None, "yes"
    if len(ranks) > 1:
        named = PrefixStore(f"host-{host}", store)
        try:
            mates = share_core(_gloo(named, ranks, rank, timeout_s), named, timeout_s=timeout_s)
        except (Apart, CoreMissing) as reason:
            refusal = f"{_NO}{reason}"
    board = Board(PrefixStore("hosts", store), timeout_s=timeout_s)
    answers = board.all_gather("mates", refusal, rank=rank, ranks=range(division.size))
    if found := next((answer for answer in answers if answer.startswith(_NO)), None):
        raise Apart(found.removeprefix(_NO))
    first = tuple(ranks[0] for ranks in division.hosts)
    leaders = _gloo(PrefixStore("leaders", store), first, rank, timeout_s) if rank in first else None
    return Hierarchical(flat, division, mates=mates, leaders=leaders)


def _gloo(store: Store, ranks: Sequence[int], rank: int, timeout_s: float) -> Any:
    return open_gloo(store, ranks.index(rank), len(ranks), timeout_s=timeout_s)
