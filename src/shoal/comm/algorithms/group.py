"""`AlgorithmGroup`: a Gloo group whose collectives are made of messages, by a table for each size.

With "auto" the group probes its links when it opens, and again when it is told to (`look`), so that the choice, and
with it the order of sums, may differ from one run to the next; a named algorithm is the same in every run. A table is
priced by what links do, and Gloo's own ring is made in C++ with two threads: so both are timed once, and all-reduces
are Gloo's where its ring is about as fast, as it takes less of a processor. Groups for which the named algorithm does
not exist (a torus of five ranks, a hierarchy of one host) take the cheapest. Gloo makes what has no table: reductions
other than sum, max and min, parts of different sizes, gather and scatter. The ranks always agree on that.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.table import CollectiveTable, Kind
from shoal.comm.algorithms import execute
from shoal.comm.algorithms.choose import choose, choose_named
from shoal.comm.collective import Collective, GroupCollective, Handle, Reduction
from shoal.comm.config import Algorithm
from shoal.comm.worker import Worker
from shoal.topology.links import Links, Matrix, clustered, measured

# Measures the links between all ranks of a group: a latency and a rate for each direction of each pair, and the gap.
#
# One pair measures at a time while the others wait at a barrier, so that nobody shares a link. A tiny message there and
# back takes twice the latency; a larger one there and a tiny one back gives the rate; several tiny ones there and one
# back give what each further message costs. Inside a host the larger message hardly takes longer than the tiny one:
# then a still larger one is sent, because a rate is a difference of two times and must not be their noise. Medians are
# taken; all ranks get the same numbers.


LEAST_SHARE = 0.1
"""Of a timing that counts as transfer when noise makes the latency look like all of it."""
MANY = 8
"""Tiny messages at once, to see what each costs beside the latency."""
DOMINATES = 4.0
"""A transfer is measured well when it takes this many times as long as a tiny message."""
GROWTH, MOST_BYTES = 8, 1 << 24
REPEATS_AGAIN = 3
"""Of each message where a run measures its links again, whose median counts."""
_PROBE_TAG, _TOLD = 900_001, 900_002


def probe(group: Collective, *, device: torch.device, size_bytes: int = 1 << 18, repeats: int = 5) -> Links:
    """The links of `group`, its hosts read from them. Every rank has to call it; n (n-1) measurements.

    `size_bytes`, the first size of the larger message, has to exceed what the network lets through in a burst.
    """
    own = torch.ones(group.size, 3, dtype=torch.float64, device=device)
    for source, target in permutations(range(group.size), 2):
        if group.rank == source:
            own[target] = torch.tensor(_time(group, target, device, size_bytes, repeats), dtype=torch.float64)
        elif group.rank == target:
            _answer(group, source, device, repeats)
        group.barrier().wait()
    everyone = torch.empty(group.size * group.size, 3, dtype=torch.float64, device=device)
    group.all_gather(everyone, own).wait()
    latency, rate, gap = everyone.view(group.size, group.size, 3).cpu().unbind(-1)
    apart = ~torch.eye(group.size, dtype=torch.bool)
    return measured(_matrix(latency), _matrix(rate), gap_s=float(gap[apart].median()) if group.size > 1 else 0.0)


def _matrix(tensor: torch.Tensor) -> Matrix:
    return tuple(tuple(row) for row in tensor.tolist())


def _time(
    group: Collective, target: int, device: torch.device, size_bytes: int, repeats: int
) -> tuple[float, float, float]:
    """(latency_s, bytes_s, gap_s) towards `target`."""
    tiny_s = _median_s(group, target, device, 1, 1, repeats)
    many_s = _median_s(group, target, device, 1, MANY, repeats)
    large_s = _median_s(group, target, device, size_bytes, 1, repeats)
    while large_s < DOMINATES * tiny_s and size_bytes * GROWTH <= MOST_BYTES:
        size_bytes *= GROWTH
        large_s = _median_s(group, target, device, size_bytes, 1, repeats)
    _tell(group, target, device, 0, 0)
    rate = size_bytes / max(large_s - tiny_s, LEAST_SHARE * large_s)
    return tiny_s / 2, rate, max(0.0, many_s - tiny_s) / (MANY - 1)


def _median_s(group: Collective, target: int, device: torch.device, size: int, count: int, repeats: int) -> float:
    """Seconds for `count` messages of `size` bytes there and a tiny one back."""
    _tell(group, target, device, size, count)
    message, reply, times = _bytes(size, device), _bytes(1, device), []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        sent = [group.send(message, to=target, tag=_PROBE_TAG) for _ in range(count)]
        group.recv(reply, source=target, tag=_PROBE_TAG).wait()
        for handle in sent:
            handle.wait()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])  # the first opens connections and touches memory


def _tell(group: Collective, target: int, device: torch.device, size: int, count: int) -> None:
    """What comes next: a size and how many of it; none at the end."""
    group.send(torch.tensor([size, count], device=device), to=target, tag=_TOLD).wait()


def _answer(group: Collective, source: int, device: torch.device, repeats: int) -> None:
    """The other side of `_median_s`, until `source` tells the end."""
    told = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        group.recv(told, source=source, tag=_TOLD).wait()
        size, count = (int(number) for number in told)
        if count == 0:
            return
        messages, reply = [_bytes(size, device) for _ in range(count)], _bytes(1, device)
        for _ in range(repeats + 1):
            for handle in [group.recv(message, source=source, tag=_PROBE_TAG) for message in messages]:
                handle.wait()
            group.send(reply, to=source, tag=_PROBE_TAG).wait()


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


# Collectives by the cheapest algorithm for their size, on given links.
#
# `Tables` chooses a table once for each power of two; it holds no group, so that it keeps none open. `ChosenCollective`
# runs the tables over `send` and `recv` of the group below, and passes on what has none. Collectives run one after the
# other in a thread of their own, in the order of the calls.


RACES = 3
RACED = (4 << 10, 256 << 10)
"""Bytes of the all-reduces that are timed by a table and by Gloo itself. Each stands for larger ones, to the next."""
TABLE_WITHIN = 0.9
"""A table is taken where it takes at most this part of the time of Gloo's own ring."""


class Followed(NamedTuple):
    """What a group chooses by: its links, and for each of `RACED` whether Gloo's own all-reduce is taken."""

    links: Links
    gloos: tuple[bool, ...] = (False,) * len(RACED)


class Tables:
    """Chosen once for each power of two. `name`: all-reduces by the algorithm of that name, wherever the links lead."""

    def __init__(self, links: Links, *, add_bytes_s: float = math.inf, name: str | None = None) -> None:
        self._followed, self._add_bytes_s, self._name = Followed(links), add_bytes_s, name
        self._made: dict[tuple[Kind, int, int], CollectiveTable] = {}

    @property
    def ranks(self) -> int:
        """How many ranks a table is for."""
        return self._followed.links.ranks

    @property
    def followed(self) -> Followed:
        """What tables are chosen by."""
        return self._followed

    def follow(self, followed: Followed) -> None:
        """Tables are chosen by this, the same on all ranks, from the next call on."""
        if followed != self._followed:
            self._followed = followed
            self._made.clear()

    def is_gloos(self, size_bytes: int, dtype: torch.dtype = torch.float32) -> bool:
        """Whether an all-reduce of this size is left to Gloo, which has no sums of int16."""
        return dtype != torch.int16 and self._followed.gloos[sum(size_bytes >= least for least in RACED[1:])]

    def __call__(self, kind: Kind, size_bytes: int, *, root: int = 0) -> CollectiveTable:
        """For the whole vector of `size_bytes`, or for what one rank holds for an all-to-all."""
        key = (kind, size_bytes.bit_length(), root)
        if key not in self._made:
            self._made[key] = self._choose(kind, float(1 << size_bytes.bit_length()), root)
        return self._made[key]

    def _choose(self, kind: Kind, size: float, root: int) -> CollectiveTable:
        links = self._followed.links
        named = choose_named(self._name, kind, size, links, root=root) if self._name else None
        return (named or choose(kind, size, links, root=root, add_bytes_s=self._add_bytes_s)).table


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

    def look(self) -> Handle:
        """Measures the links anew, behind the calls under way, and chooses by them from then on. All ranks call it."""
        return self._worker.do(functools.partial(_look, self._inner, self.tables), what="a measurement of links")

    def close(self) -> None:
        """Waits for what is under way and ends the thread."""
        self._worker.close()

    def _run(self, function: Callable[..., None], *args: object, **keywords: object) -> Handle:
        return self._worker.do(functools.partial(function, *args, **keywords), what="an algorithm's messages")


def _look(inner: Collective, tables: Tables) -> None:
    """With fewer messages than at the start: the steps of a run wait for it."""
    tables.follow(Followed(probe(inner, device=torch.device("cpu"), repeats=REPEATS_AGAIN)))
    tables.follow(tables.followed._replace(gloos=race(inner, tables)))


def race(inner: Collective, tables: Tables) -> tuple[bool, ...]:
    """For each of `RACED`, whether Gloo's own all-reduce is about as fast as the table's. Every rank has to call it."""
    return tuple(_gloo_wins(inner, torch.zeros(size // 4), tables("all_reduce", size)) for size in RACED)


def _gloo_wins(inner: Collective, flat: Tensor, table: CollectiveTable) -> bool:
    seconds = torch.full((2, RACES), math.inf, dtype=torch.float64)
    for number in range(RACES):
        inner.barrier().wait()
        begin_s = time.perf_counter()
        inner.all_reduce(flat).wait()
        seconds[0, number] = time.perf_counter() - begin_s
        inner.barrier().wait()
        begin_s = time.perf_counter()
        execute.all_reduce(flat, table, inner, op="sum", tag=_TAG)
        seconds[1, number] = time.perf_counter() - begin_s
    inner.all_reduce(seconds, "max").wait()
    gloo_s, table_s = seconds.min(dim=1).values.tolist()
    return table_s > TABLE_WITHIN * gloo_s


def _nothing() -> None:
    """The group below ends with those who hold it."""


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
        """What makes an operation of `payload` bytes on each rank, where it `takes` them; None where no table does."""
        if operation not in _KINDS or not (self._all_kinds or operation == "all_reduce"):
            return None
        size_bytes = payload * self._tables.ranks if operation == "all_gather" else payload
        return self._tables(_KINDS[operation], size_bytes, root=root)

    def takes(self, operation: str, tensors: Sequence[Tensor], reduce_op: Any) -> bool:
        """Whether there are tables for these tensors and this reduction (None: nothing is reduced)."""
        op = "sum" if reduce_op is None else _reduction(tensors, reduce_op)
        if operation == "all_reduce" and op is not None:
            return not self._tables.is_gloos(tensors[0].nbytes, tensors[0].dtype)
        return op == "sum" if operation == "reduce_scatter" else op is not None


class AlgorithmGroup:
    """`inner` is a Gloo group of CPU ranks; `hosts` are theirs, in rank order. Blocks, for "auto", until all ranks have
    called it."""

    def __init__(self, inner: Any, algorithm: Algorithm, hosts: Sequence[str]) -> None:
        self._inner, self._all_kinds = inner, algorithm == "auto"
        messages = GroupCollective(inner)
        if algorithm == "auto":
            self._chosen = ChosenCollective(messages, probe(messages, device=torch.device("cpu")))
            gloos = race(messages, self._chosen.tables)
            self.follow(self.followed._replace(gloos=gloos))
        else:
            links = clustered([hosts.index(host) for host in hosts], inner=_INSIDE, outer=_BETWEEN)
            self._chosen = ChosenCollective(messages, links, name=_TABLE_NAMES.get(algorithm, algorithm))
        self.tables = GroupTables(self._chosen.tables, all_kinds=self._all_kinds)

    @property
    def pending(self) -> int:
        """Calls that the thread has not begun."""
        return self._chosen.pending

    @property
    def measures(self) -> bool:
        """Whether algorithms are chosen on measured links."""
        return self._all_kinds

    @property
    def followed(self) -> Followed:
        """What algorithms are chosen by now."""
        return self._chosen.tables.followed

    def follow(self, followed: Followed) -> None:
        """Chooses by this from now on, the same on all ranks."""
        self._chosen.tables.follow(followed)

    def look(self) -> Handle:
        """Measures the links anew, and chooses by them once that is over. All ranks call it."""
        return self._chosen.look()

    def name_for(self, size_bytes: int) -> str:
        """The algorithm of an all-reduce of this size."""
        tables = self._chosen.tables
        return "Gloo's own ring" if tables.is_gloos(size_bytes) else tables("all_reduce", size_bytes).name

    def __getattr__(self, name: str) -> Any:
        """Any other operation is Gloo's. Forwarded by name, because c10d's names differ between torch versions."""
        return getattr(self._inner, name)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = _reduction(tensors, opts.reduceOp)
        if op is None or self._chosen.tables.is_gloos(tensors[0].nbytes, tensors[0].dtype):
            return self._inner.allreduce(tensors, opts)
        return self._chosen.all_reduce(tensors[0], op)

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
