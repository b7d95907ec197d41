"""Collectives by the cheapest algorithm for their size, on given links.

`Tables` chooses a table once for each power of two; it holds no group, so that it keeps none open. `ChosenCollective`
runs the tables over `send` and `recv` of the group below, and passes on what has none. Collectives run one after the
other in a thread of their own, in the order of the calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.collectives.table import CollectiveTable, Kind
from shoal.comm.algorithms import execute
from shoal.comm.algorithms.choose import choose, choose_named
from shoal.comm.collective import Collective, Handle, Reduction
from shoal.comm.worker import Worker
from shoal.topology.links import Links


class Tables:
    """Chosen once for each power of two. `name`: all-reduces by the algorithm of that name, wherever the links lead."""

    def __init__(self, links: Links, *, add_bytes_s: float = math.inf, name: str | None = None) -> None:
        self._links, self._add_bytes_s, self._name = links, add_bytes_s, name
        self._made: dict[tuple[Kind, int, int], CollectiveTable] = {}

    @property
    def ranks(self) -> int:
        """How many ranks a table is for."""
        return self._links.ranks

    def __call__(self, kind: Kind, size_bytes: int, *, root: int = 0) -> CollectiveTable:
        """For the whole vector of `size_bytes`, or for what one rank holds for an all-to-all."""
        key = (kind, size_bytes.bit_length(), root)
        if key not in self._made:
            self._made[key] = self._choose(kind, float(1 << size_bytes.bit_length()), root)
        return self._made[key]

    def _choose(self, kind: Kind, size: float, root: int) -> CollectiveTable:
        named = choose_named(self._name, kind, size, self._links, root=root) if self._name else None
        return (named or choose(kind, size, self._links, root=root, add_bytes_s=self._add_bytes_s)).table


_TAG = 1_000_000
"""Above the tags of those who send to each other themselves."""


class ChosenCollective:
    """Over `inner`, whose ranks have to pass the same `links` (`probe` gives them). Close it when it is done with.

    `name`: all-reduces by the algorithm of that name, wherever the links would lead.
    """

    def __init__(
        self, inner: Collective, links: Links, *, add_bytes_s: float = math.inf, name: str | None = None
    ) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self.tables = Tables(links, add_bytes_s=add_bytes_s, name=name)
        self._worker = Worker(_nothing, name="shoal-algorithms", goes_on=True)

    @property
    def wire(self) -> str:
        return self._inner.wire

    @property
    def pending(self) -> int:
        """Calls that the thread has not begun."""
        return self._worker.pending

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Handle:
        table = self.tables("all_reduce", tensor.nbytes)
        return self._run(execute.all_reduce, tensor, table, self._inner, op=op, tag=_TAG)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Handle:
        table = self.tables("reduce_scatter", input.nbytes)
        return self._run(execute.reduce_scatter, output, input, table, self._inner, tag=_TAG)

    def all_gather(self, output: Tensor, input: Tensor) -> Handle:
        table = self.tables("all_gather", output.nbytes)
        return self._run(execute.all_gather, output, input, table, self._inner, tag=_TAG)

    def all_to_all(
        self, output: Tensor, input: Tensor, *, output_sizes: Sequence[int] = (), input_sizes: Sequence[int] = ()
    ) -> Handle:
        """Parts of different sizes are left to the group below."""
        if output_sizes or input_sizes:
            return self._inner.all_to_all(output, input, output_sizes=output_sizes, input_sizes=input_sizes)
        table = self.tables("all_to_all", input.nbytes)
        return self._run(execute.all_to_all, output, input, table, self._inner, tag=_TAG)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> Handle:
        table = self.tables("broadcast", tensor.nbytes, root=root)
        return self._run(execute.broadcast, tensor, table, self._inner, tag=_TAG)

    def reduce(self, tensor: Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        table = self.tables("reduce", tensor.nbytes, root=root)
        return self._run(execute.reduce, tensor, table, self._inner, op=op, tag=_TAG)

    def gather(self, outputs: Sequence[Tensor], input: Tensor, *, root: int = 0) -> Handle:
        return self._inner.gather(outputs, input, root=root)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], *, root: int = 0) -> Handle:
        return self._inner.scatter(output, inputs, root=root)

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Handle:
        return self._inner.send(tensor, to=to, tag=tag)

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Handle:
        return self._inner.recv(tensor, source=source, tag=tag)

    def barrier(self) -> Handle:
        return self._inner.barrier()

    def close(self) -> None:
        """Waits for what is under way and ends the thread."""
        self._worker.close()

    def _run(self, function: Callable[..., None], *args: object, **keywords: object) -> Handle:
        return self._worker.do(functools.partial(function, *args, **keywords), what="an algorithm's messages")


def _nothing() -> None:
    """The group below ends with those who hold it."""
