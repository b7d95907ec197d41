"""`CoreGroup`: c10d's process group of CPU ranks of one host, over the shared-memory core.

What the core does not do (sparse tensors, bit-wise reductions, means of integers) goes to the Gloo group beside it.
Which way a call goes follows from its dtype, layout and reduction alone: the ranks always agree.

c10d has two names for some operations: new ones (`all_gather_single`, torch 2.13) and old ones (`_allgather_base`).
"""

# pyright: reportIncompatibleMethodOverride=false
# The stubs of ProcessGroup list several overloads under one name; these are the forms that backends implement.

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.board import Board
from shoal.comm.c10d_forms import (
    GlooGroup,
    MonitoredBarrier,
    check_blocks,
    checked_root,
    given_timeout_s,
    joined,
    listed,
    profiler_enabled,
    ranged,
    untraced,
)
from shoal.comm.shm.core import BYTES, DTYPES, REDUCTIONS, Kind, core_settings, load_core
from shoal.comm.shm.host import find_mates
from shoal.comm.shm.transport import Transport, number_of

Finish = list[Callable[[], object]]


def _numbers_of(reduction: str) -> dict[torch.dtype, tuple[int, int]]:
    """The core's numbers of dtype and reduction, by dtype: of those that it reduces so."""
    by, halves = REDUCTIONS.index(reduction), {torch.complex64: torch.float32, torch.complex128: torch.float64}
    dtypes = {getattr(torch, name): n for name, n in DTYPES.items()}
    numbers = {dtype: (n, by) for dtype, n in dtypes.items() if reduction != "avg" or dtype.is_floating_point}
    if reduction in ("sum", "avg"):
        numbers |= {dtype: numbers[half] for dtype, half in halves.items()}
    return numbers


_SUM = dist.ReduceOp.SUM
_SUMS = _numbers_of("sum")
_OTHERS: dict[Any, dict[torch.dtype, tuple[int, int]]] = {
    dist.ReduceOp(dist.ReduceOp.AVG): _numbers_of("avg"),
    dist.ReduceOp(dist.ReduceOp.MAX): _numbers_of("max"),
    dist.ReduceOp(dist.ReduceOp.MIN): _numbers_of("min"),
    dist.ReduceOp(dist.ReduceOp.PRODUCT): _numbers_of("product"),
}


def share_core(inner: Any, store: Store, *, timeout_s: float, prompt: bool = False) -> CoreGroup:
    """`inner`, of two ranks or more, behind the core in C. Blocks until all ranks of the group have called it.

    Raises `CoreMissing` or `Apart` with the reason why not, on all ranks alike. `prompt`: see `Transport`.
    """
    rank, size = inner.rank(), inner.size()
    board = Board(PrefixStore("shm", store), timeout_s=timeout_s)
    settings = core_settings(size, timeout_s=timeout_s, threads=torch.get_num_threads())
    mates = find_mates(board, rank, size, settings=settings)
    barrier = MonitoredBarrier(board.under("monitored"), rank=rank, size=size)
    return CoreGroup(inner, Transport(load_core(), mates, rank=rank, settings=settings, prompt=prompt), barrier)


@untraced
class CoreGroup(dist.ProcessGroup):
    """`inner` is a Gloo group of the same ranks. Tensors may be of any strides. A call gives a work, or None where its
    transport is `prompt`.
    """

    def __init__(self, inner: Any, transport: Transport, monitored: MonitoredBarrier) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self.inner, self._transport, self._monitored = inner, transport, monitored
        if isinstance(inner, GlooGroup):
            inner.follow_timeout(transport.set_timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, inner)

    def getBackendName(self) -> str:
        return "shoal"

    def close(self) -> None:
        """Ends the group when the calls that were made are done."""
        self._transport.close()

    def shutdown(self) -> None:
        self.close()
        self.inner.shutdown()

    def abort(self) -> None:
        self._transport.give_up()
        self.inner.abort()

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Collective.allocate`."""
        size_bytes = numel * dtype.itemsize
        if size_bytes == 0 or device.type != "cpu":
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._transport.allocate(size_bytes).view(dtype)

    def peer(self, memory: Tensor, rank: int) -> Tensor:
        """See `Transport.peer`; of the dtype and shape of `memory`, which is contiguous."""
        return self._transport.peer(memory, rank).view(memory.dtype).view(memory.shape)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if profiler_enabled():
            return self._allreduce(listed(tensors), opts or c10d.AllreduceOptions())
        # A small sum takes less time than the interpreter's way to it: this is the shortest (decision 0023).
        if opts is not None and not opts.asyncOp and type(tensors) is list and len(tensors) == 1:
            tensor, numbers = tensors[0], None
            if opts.reduceOp == _SUM and tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous():
                numbers = _SUMS.get(tensor.dtype)
            if numbers is not None:
                (dtype, by), at = numbers, tensor.data_ptr()
                return self._transport.at_once(Kind.ALL_REDUCE, dtype, by, 0, at, at, tensor.nbytes, tensors)
        return self._allreduce(listed(tensors), opts or c10d.AllreduceOptions())

    @ranged("all_reduce")
    def _allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        if len(tensors) == 1 and (alone := _reducible(tensors[0], opts.reduceOp)) is not None:
            return self._reduced(Kind.ALL_REDUCE, tensors[0], alone, opts)
        if (numbers := _all_reducible(tensors, opts.reduceOp)) is None:
            return self.inner.allreduce(tensors, opts)
        return joined([self._reduced(Kind.ALL_REDUCE, *each, opts) for each in zip(tensors, numbers, strict=True)])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self.allreduce(tensors, opts)

    @ranged("reduce")
    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceOptions()
        tensors = listed(tensors)
        if (numbers := _all_reducible(tensors, opts.reduceOp)) is None:
            return self.inner.reduce(tensors, opts)
        pairs, root = zip(tensors, numbers, strict=True), checked_root(opts.rootRank, self.size())
        return joined([self._reduced(Kind.REDUCE, *pair, opts, root=root) for pair in pairs])

    @ranged("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.BroadcastOptions()
        return joined([self._broadcast(tensor, opts) for tensor in listed(tensors)])

    @ranged("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        works = [self._gathered(Kind.ALL_GATHER, outs, own, opts) for outs, own in zip(outputs, inputs, strict=True)]
        return joined(works)

    @ranged("all_gather")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(f"all_gather of {_shown(input)} into {_shown(output)}: it takes one block for each rank")
        finish: Finish = []
        return self._transport.collective(
            Kind.ALL_GATHER, input.contiguous(), _writable(output, finish), count=input.nbytes,
            dtype=number_of(input), sync=_sync(opts), outputs=[output], finish=finish,
        )  # fmt: skip

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, input, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return joined([self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.allgather([[row[i] for row in outputs] for i in range(len(inputs))], inputs, opts)

    @ranged("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        checked_root(opts.rootRank, self.size())
        outs = outputs[0] if self.rank() == opts.rootRank else []
        return self._gathered(Kind.GATHER, outs, inputs[0], opts, root=opts.rootRank)

    @ranged("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        checked_root(opts.rootRank, self.size())
        output, finish = outputs[0], []
        blocks = [block.contiguous() for block in inputs[0]] if self.rank() == opts.rootRank else []
        if self.rank() == opts.rootRank:
            self._check_blocks("scatter", blocks, output)
        return self._transport.collective_of_lists(
            Kind.SCATTER, blocks, [_writable(output, finish)], count=output.nbytes, dtype=number_of(output),
            root=opts.rootRank, sync=_sync(opts), outputs=[output], finish=finish,
        )  # fmt: skip

    @ranged("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (numbers := _all_reducible(outputs, opts.reduceOp)) is None:
            return self.inner.reduce_scatter(outputs, inputs, opts)
        triples = zip(outputs, inputs, numbers, strict=True)
        return joined([self._reduce_scattered(*triple, opts) for triple in triples])

    @ranged("reduce_scatter")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (numbers := _reducible(output, opts.reduceOp)) is None:
            return self.inner._reduce_scatter_base(output, input, opts)
        if input.numel() != output.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(f"reduce_scatter of {_shown(input)} into {_shown(output)}: it takes a block for each rank")
        finish: Finish = []
        return self._transport.collective(
            Kind.REDUCE_SCATTER, input.contiguous(), _writable(output, finish), count=output.nbytes,
            dtype=numbers[0], reduction=numbers[1], sync=_sync(opts), outputs=[output], finish=finish,
        )  # fmt: skip

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        reduce_op = (opts or c10d.ReduceScatterOptions()).reduceOp
        each = c10d.ReduceScatterOptions()
        each.reduceOp = reduce_op
        return joined([self.reduce_scatter_single(o, i, each) for o, i in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    @ranged("all_to_all")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        finish: Finish = []
        source, target = input.contiguous(), _writable(output, finish)
        receive, send = _split(target, out_sizes, self.size()), _split(source, in_sizes, self.size())
        self._check_exchange(receive, send)
        return self._transport.collective_of_lists(
            Kind.ALL_TO_ALL, send, receive, count=0, dtype=number_of(input), sync=_sync(opts), outputs=[output],
            finish=finish,
        )  # fmt: skip

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any = None
    ) -> Any:
        return self.all_to_all_single(output, input, out_sizes, in_sizes, opts)

    @ranged("all_to_all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._check_exchange(outputs, inputs)
        finish: Finish = []
        return self._transport.collective_of_lists(
            Kind.ALL_TO_ALL, [block.contiguous() for block in inputs], [_writable(o, finish) for o in outputs],
            count=0, dtype=_common(inputs), sync=_sync(opts), outputs=outputs, finish=finish,
        )  # fmt: skip

    @ranged("send")
    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        self._check_peer(dstRank)
        return self._transport.message(Kind.SEND, listed(tensors)[0].contiguous(), peer=dstRank, tag=tag)

    @ranged("recv")
    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        self._check_peer(srcRank)
        return self._receive(listed(tensors)[0], srcRank, tag)

    @ranged("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._receive(listed(tensors)[0], -1, tag)

    @ranged("barrier")
    def barrier(self, opts: Any = None) -> Any:
        return self._transport.collective(
            Kind.BARRIER, None, None, count=0, sync=_sync(opts), timeout_s=given_timeout_s(opts)
        )

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        if timeout is None or timeout < timedelta(0):
            timeout = timedelta(seconds=self._transport.timeout_s)
        self._monitored.wait(timeout, all_ranks=wait_all_ranks)

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on all ranks: there is nothing to agree on."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has made: ranks with other numbers have left each other."""
        return self._transport.calls + self.inner._get_sequence_number_for_group()

    def _reduced(self, kind: Kind, tensor: Tensor, numbers: tuple[int, int], opts: Any, root: int = 0) -> Any:
        finish: Finish = []
        flat = _writable(tensor, finish, copy=True)
        return self._transport.collective(
            kind, flat, flat, count=flat.nbytes, dtype=numbers[0], reduction=numbers[1], root=root, sync=_sync(opts),
            outputs=[tensor], finish=finish,
        )  # fmt: skip

    def _broadcast(self, tensor: Tensor, opts: Any) -> Any:
        finish: Finish = []
        flat, root = _writable(tensor, finish, copy=True), checked_root(opts.rootRank, self.size())
        return self._transport.collective(
            Kind.BROADCAST, flat, flat, count=flat.nbytes, dtype=number_of(tensor), root=root, sync=_sync(opts),
            outputs=[tensor], finish=finish,
        )  # fmt: skip

    def _gathered(self, kind: Kind, outputs: Sequence[Tensor], own: Tensor, opts: Any, root: int = 0) -> Any:
        if kind is Kind.ALL_GATHER or self.rank() == root:
            self._check_blocks(kind.name.lower(), outputs, own)
        finish: Finish = []
        return self._transport.collective_of_lists(
            kind, [own.contiguous()], [_writable(output, finish) for output in outputs], count=own.nbytes,
            dtype=number_of(own), root=root, sync=_sync(opts), outputs=list(outputs), finish=finish,
        )  # fmt: skip

    def _reduce_scattered(self, output: Tensor, blocks: Sequence[Tensor], numbers: tuple[int, int], opts: Any) -> Any:
        if len({block.numel() for block in blocks}) > 1:
            return self._reduced_one_by_one(output, blocks, numbers, opts)
        self._check_blocks("reduce_scatter", blocks, output)
        finish: Finish = []
        return self._transport.collective_of_lists(
            Kind.REDUCE_SCATTER, [block.contiguous() for block in blocks], [_writable(output, finish)],
            count=output.nbytes, dtype=numbers[0], reduction=numbers[1], sync=_sync(opts), outputs=[output],
            finish=finish,
        )  # fmt: skip

    def _reduced_one_by_one(self, output: Tensor, blocks: Sequence[Tensor], numbers: tuple[int, int], opts: Any) -> Any:
        """Blocks of different sizes: each is reduced to its rank. All ranks bring blocks of the same sizes."""
        check_blocks(output, blocks, rank=self.rank(), size=self.size())
        finish: Finish = []
        into, works = _writable(output, finish), []
        for root, block in enumerate(blocks):
            mine = root == self.rank()
            work = self._transport.collective(
                Kind.REDUCE, block.contiguous(), into if mine else None, count=block.nbytes, dtype=numbers[0],
                reduction=numbers[1], root=root, sync=_sync(opts), outputs=[output] if mine else [],
                finish=finish if mine else [],
            )  # fmt: skip
            works.append(work)
        return joined(works)

    def _receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        finish: Finish = []
        return self._transport.message(Kind.RECV, _writable(tensor, finish), peer=source, tag=tag, finish=finish)

    def _check_blocks(self, operation: str, blocks: Sequence[Tensor], own: Tensor) -> None:
        if len(blocks) != self.size():
            raise ValueError(f"{operation}: {len(blocks)} tensors for {self.size()} ranks; give one for each")
        for block in blocks:
            if block.numel() != own.numel() or block.dtype != own.dtype:
                found = f"a block of {_shown(block)} beside one of {_shown(own)}"
                raise ValueError(f"{operation}: {found}; all must be alike")

    def _check_exchange(self, receive: Sequence[Tensor], send: Sequence[Tensor]) -> None:
        """What the rank sends itself is compared here, what the others send by the core."""
        if not len(receive) == len(send) == self.size():
            found = f"{len(receive)} to receive and {len(send)} to send"
            raise ValueError(f"all_to_all: {found} for {self.size()} ranks; give one for each")
        ours, theirs = send[self.rank()], receive[self.rank()]
        if ours.nbytes != theirs.nbytes:
            raise ValueError(f"all_to_all: rank {self.rank()} sends itself {_shown(ours)} and expects {_shown(theirs)}")

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.size() or rank == self.rank():
            raise ValueError(f"rank {rank} is no peer of rank {self.rank()} in a group of {self.size()}")


def _sync(opts: Any) -> bool:
    return opts is not None and not opts.asyncOp


def _shown(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def _reducible(tensor: Tensor, reduce_op: Any) -> tuple[int, int] | None:
    """The core's numbers of dtype and reduction; None where it has none."""
    numbers = (_SUMS if reduce_op == _SUM else _OTHERS.get(reduce_op, {})).get(tensor.dtype)  # hashing takes 1 us
    return numbers if tensor.layout is torch.strided and tensor.is_cpu else None


def _all_reducible(tensors: Sequence[Tensor], reduce_op: Any) -> list[tuple[int, int]] | None:
    numbers = [_reducible(tensor, reduce_op) for tensor in tensors]
    return None if None in numbers else numbers  # pyright: ignore[reportReturnType]


def _common(tensors: Sequence[Tensor]) -> int:
    """The core's number of the dtype of all of them."""
    return number_of(tensors[0]) if len({tensor.dtype for tensor in tensors}) == 1 else BYTES


def _writable(tensor: Tensor, finish: Finish, *, copy: bool = False) -> Tensor:
    """`tensor` where it is contiguous; else memory (`copy`: with its content) that `finish` copies back."""
    if tensor.is_contiguous():
        return tensor
    flat = tensor.contiguous() if copy else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    finish.append(lambda: tensor.data.copy_(flat))  # as with Gloo, autograd does not count this as a change
    return flat


def _split(tensor: Tensor, sizes: Sequence[int], ranks: int) -> Sequence[Tensor]:
    """By dim 0; equally where no sizes are given."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes and rows % ranks:
        raise ValueError(f"all_to_all of {rows} rows over {ranks} ranks: give sizes, or a multiple of the ranks")
    sizes = list(sizes) or [rows // ranks] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ValueError(f"all_to_all of {rows} rows over {ranks} ranks: sizes {sizes} do not add up")
    return tensor.split(sizes)
