"""`AlgorithmGroup`: a Gloo group whose collectives are made of messages, by a table for each size.

With "auto" the group probes its links when it opens, so that the choice, and with it the order of sums, may differ from
one run to the next; a named algorithm is the same in every run. Groups for which the named algorithm does not exist (a
torus of five ranks, a hierarchy of one host) take the cheapest. Gloo makes what has no table: reductions other than
sum, max and min, parts of different sizes, gather and scatter. The ranks always agree on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.table import CollectiveTable, Kind
from shoal.comm.algorithms.probe import probe
from shoal.comm.algorithms.tables import ChosenCollective, Tables
from shoal.comm.collective import GroupCollective, Reduction
from shoal.comm.config import Algorithm
from shoal.topology.links import clustered

# Where nothing was measured, (seconds, bytes a second): memory, and Ethernet of 10 Gbit/s. They decide the number of
# blocks of a pipelined tree, and that ranks of a host stand together.
_INSIDE, _BETWEEN = (20e-6, 5e9), (50e-6, 1.25e9)
_TABLE_NAMES = {"recursive-doubling": "recursive doubling", "double-tree": "double tree"}
_OPS: dict[Any, Reduction] = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max", dist.ReduceOp.MIN: "min"}
_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
_NUMBERS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip


class GroupTables:
    """What a group makes by which table, for those who count it. Refers to no group."""

    def __init__(self, tables: Tables, *, all_kinds: bool) -> None:
        self._tables, self._all_kinds = tables, all_kinds

    def __call__(self, operation: str, payload: int, root: int = 0) -> CollectiveTable | None:
        """What makes an operation of `payload` bytes on each rank; None where that is Gloo's own way."""
        if operation not in _KINDS or not (self._all_kinds or operation == "all_reduce"):
            return None
        size_bytes = payload * self._tables.ranks if operation == "all_gather" else payload
        return self._tables(_KINDS[operation], size_bytes, root=root)

    def takes(self, operation: str, tensors: Sequence[Tensor], reduce_op: Any) -> bool:
        """Whether there are tables for these tensors and this reduction (None: nothing is reduced)."""
        op = "sum" if reduce_op is None else _reduction(tensors, reduce_op)
        return op == "sum" if operation == "reduce_scatter" else op is not None


class AlgorithmGroup:
    """`inner` is a Gloo group of CPU ranks; `hosts` are theirs, in rank order. Blocks, for "auto", until all ranks have
    called it."""

    def __init__(self, inner: Any, algorithm: Algorithm, hosts: Sequence[str]) -> None:
        self._inner, self._all_kinds = inner, algorithm == "auto"
        messages = GroupCollective(inner)
        if algorithm == "auto":
            self._chosen = ChosenCollective(messages, probe(messages, device=torch.device("cpu")))
        else:
            links = clustered([hosts.index(host) for host in hosts], inner=_INSIDE, outer=_BETWEEN)
            self._chosen = ChosenCollective(messages, links, name=_TABLE_NAMES.get(algorithm, algorithm))
        self.tables = GroupTables(self._chosen.tables, all_kinds=self._all_kinds)

    @property
    def pending(self) -> int:
        """Calls that the thread has not begun."""
        return self._chosen.pending

    def __getattr__(self, name: str) -> Any:
        """Any other operation is Gloo's. Forwarded by name, because c10d's names differ between torch versions."""
        return getattr(self._inner, name)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = _reduction(tensors, opts.reduceOp)
        return self._inner.allreduce(tensors, opts) if op is None else self._chosen.all_reduce(tensors[0], op)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = _reduction(tensors, opts.reduceOp)
        if op is None or not self._all_kinds:
            return self._inner.reduce(tensors, opts)
        return self._chosen.reduce(tensors[0], op, root=opts.rootRank)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        if len(tensors) != 1 or not self._all_kinds:
            return self._inner.broadcast(tensors, opts)
        return self._chosen.broadcast(tensors[0], root=opts.rootRank)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        if not self._all_kinds:
            return self._inner._allgather_base(output, input, opts)
        return self._chosen.all_gather(output, input)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        if not self._all_kinds or not self.tables.takes("reduce_scatter", [input], opts.reduceOp):
            return self._inner._reduce_scatter_base(output, input, opts)
        return self._chosen.reduce_scatter(output, input)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any
    ) -> Any:
        if not self._all_kinds or out_sizes or in_sizes:
            return self._inner.alltoall_base(output, input, out_sizes, in_sizes, opts)
        return self._chosen.all_to_all(output, input)


def _reduction(tensors: Sequence[Tensor], reduce_op: Any) -> Reduction | None:
    """None where no table has it."""
    if len(tensors) != 1 or tensors[0].dtype not in _NUMBERS or tensors[0].layout is not torch.strided:
        return None
    return next((op for kind, op in _OPS.items() if reduce_op == kind), None)
