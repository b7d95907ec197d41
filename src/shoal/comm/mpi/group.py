"""`MpiGroup`: the process group of CPU ranks over an MPI communicator.

Every call is a non-blocking one of MPI, so that several may be under way; all ranks must make them in the same order.
Sums are MPI's: the same bits in every run on the same ranks (MPI-4.1, section 6.9.1, advises so). To open a group, the
ranks tell each other their numbers in MPI's world through the store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from shoal.comm.board import Board
from shoal.comm.mpi.request import MpiWork, UnderWay, added, moved, numbers_of, operation
from shoal.comm.mpi.world import communicator, load_mpi

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
