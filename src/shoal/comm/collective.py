"""`Collective`: what Shoal's own code calls to talk to other ranks. Tensors go in, a handle comes out.

`GroupCollective` calls a process group; `Alone` is the group of one rank, whose results are its own contribution;
`tests/comm/local.py` has a group of threads in one process. All tensors of a call have the same shape and dtype on
every rank unless sizes are given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.errors import CollectiveError

Reduction = Literal["sum", "max", "min"]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Blocks until the result is in place. Raises `CollectiveError` where a rank is dead, stopped or late."""
        ...


class Collective(Protocol):
    """The ranks of one group. Results are written into the tensors that are passed in."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def wire(self) -> str:
        """What the ranks talk over, and why, for people."""
        ...

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros `[numel]` for tensors that the group will often be given, whole or in parts.

        Where the group can make memory that its ranks reach in each other (CPU ranks of one host: symmetric memory, as
        NCCL's windows), its collectives copy less there; elsewhere it is ordinary memory. Results are the same bits.
        A rank that calls it for one tensor does so for the same one on all ranks, in the same order; nobody waits.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> Handle:
        """`tensor` becomes the reduction over all ranks, the same bits on each."""
        ...

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """`output` [n / size, ...] becomes this rank's part of the sum of `input` [n, ...]."""
        ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """`output` [size * n, ...] becomes every rank's `input` [n, ...], in rank order."""
        ...

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
    ) -> Handle:
        """Part i of `input` goes to rank i, part j of `output` comes from rank j. Sizes are of dim 0; none: equal."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle: ...

    def reduce(self, tensor: torch.Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        """`tensor` of the root becomes the reduction; the others' content is undefined afterwards."""
        ...

    def gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, *, root: int = 0) -> Handle:
        """At the root, `outputs[r]` becomes rank r's `input`; the others pass an empty sequence."""
        ...

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int = 0) -> Handle:
        """`output` becomes the root's `inputs[rank]`; the others pass an empty sequence."""
        ...

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle: ...

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle: ...

    def barrier(self) -> Handle: ...


class Allocate(Protocol):
    """How a group allocates, see `Collective.allocate`."""

    def __call__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


class SharedMemory(Protocol):
    """Memory that the ranks of a group reach in each other."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Collective.allocate`."""
        ...

    def peer(self, memory: torch.Tensor, rank: int) -> torch.Tensor:
        """The memory that `rank` got from the call of `allocate` that gave this rank `memory`; all have made it."""
        ...


def ordinary(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a group gives that has no memory of its own: zeros `[numel]`."""
    return torch.zeros(numel, dtype=dtype, device=device)


_OPERATIONS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class GroupCollective:
    """`Collective` over a process group. `memory`: what allocates; None: ordinary memory."""

    def __init__(self, group: dist.ProcessGroup, memory: SharedMemory | None = None) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._memory = memory

    @property
    def wire(self) -> str:
        return getattr(self.group, "why", "") or self.group.name()

    @property
    def hosts(self) -> Sequence[str]:
        """The identity of each rank's host, in rank order; empty where nobody knows."""
        return getattr(self.group, "hosts", ())

    @property
    def device(self) -> torch.device:
        """Where its tensors lie, all of them."""
        return getattr(self.group, "device", _CPU)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocate: Allocate = ordinary if self._memory is None else self._memory.allocate
        return allocate(numel, dtype=dtype, device=device)

    def shared(self, numel: int, *, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """`allocate`s on the CPU, and gives every rank's memory, in rank order, for this rank to read and write where
        it lies; empty where ranks do not share memory. All ranks call it together, with the same arguments.
        """
        if self._memory is None or numel == 0:
            return ()
        own = self._memory.allocate(numel, dtype=dtype, device=torch.device("cpu"))
        self.barrier().wait()  # every rank has allocated
        peers = range(self.size)
        return [own if rank == self.rank else self._memory.peer(own, rank) for rank in peers]

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> Handle:
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]
        return self.group.allreduce([tensor], options)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return self.group._reduce_scatter_base(output, input, c10d.ReduceScatterOptions())

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return self.group._allgather_base(output, input, c10d.AllgatherOptions())

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
    ) -> Handle:
        return self.group.alltoall_base(output, input, list(output_sizes), list(input_sizes), c10d.AllToAllOptions())

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self.group.broadcast([tensor], options)

    def reduce(self, tensor: torch.Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = _OPERATIONS[op], root
        return self.group.reduce([tensor], options)

    def gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, *, root: int = 0) -> Handle:
        options = c10d.GatherOptions()
        options.rootRank = root
        return self.group.gather([list(outputs)] if self.rank == root else [], [input], options)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int = 0) -> Handle:
        options = c10d.ScatterOptions()
        options.rootRank = root
        return self.group.scatter([output], [list(inputs)] if self.rank == root else [], options)

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        return self.group.send([tensor], to, tag)

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        return self.group.recv([tensor], source, tag)

    def barrier(self) -> Handle:
        return self.group.barrier(c10d.BarrierOptions())


_CPU = torch.device("cpu")


def home_of(tensors: Sequence[Tensor], group: Collective) -> torch.device:
    """Where this rank's `tensors` lie. It may have none, as one whose piece is padding, or whose stage is frozen: then
    where those of `group` do, which takes no others. The CPU, where nothing is sent.
    """
    return tensors[0].device if tensors else getattr(group, "device", _CPU)


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


class Alone:
    """The group of an axis of size 1."""

    rank = 0
    size = 1
    wire = "one rank alone"

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return ordinary(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> Handle:
        return _Done()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return _copied(output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        return _copied(output, input)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
    ) -> Handle:
        return _copied(output, input)

    def broadcast(self, tensor: torch.Tensor, *, root: int = 0) -> Handle:
        return _Done()

    def reduce(self, tensor: torch.Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        return _Done()

    def gather(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, *, root: int = 0) -> Handle:
        return _copied(outputs[0], input)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int = 0) -> Handle:
        return _copied(output, inputs[0])

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        raise CollectiveError(f"a group of one rank was asked to send to rank {to}: it has no other")

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        raise CollectiveError(
            f"a group of one rank was asked to receive from rank {source}: there is nobody else in it"
        )

    def barrier(self) -> Handle:
        return _Done()


def _copied(output: torch.Tensor, input: torch.Tensor) -> Handle:
    output.copy_(input.view_as(output))
    return _Done()


# Gathers named tensors or short texts of all ranks: for comparisons and error messages, not for training.
#
# For named tensors each rank sends one header (names, types and shapes as JSON) and its bytes; rank 0 receives them
# from one rank after the other.


Named = Sequence[tuple[str, Tensor]]
_SIZES, _HEADER, _PAYLOAD = 101, 102, 103  # tags


def gather_named(items: Named, group: Collective, *, device: torch.device) -> list[list[tuple[str, Tensor]]]:
    """At rank 0, what each rank passed, in rank order, on the CPU; an empty list on the others.

    It travels on `device`, one that the group's backend takes.
    """
    if group.rank != 0:
        _send(items, group, device)
        return []
    own = [(name, tensor.detach().cpu().clone()) for name, tensor in items]
    return [own] + [_receive(group, rank, device) for rank in range(1, group.size)]


def _send(items: Named, group: Collective, device: torch.device) -> None:
    entries = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in items]
    header = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
    parts = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for _, tensor in items if tensor.numel()]
    payload = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
    group.send(torch.tensor([header.numel(), payload.numel()], device=device), to=0, tag=_SIZES).wait()
    group.send(header.to(device), to=0, tag=_HEADER).wait()
    if payload.numel():
        group.send(payload.to(device), to=0, tag=_PAYLOAD).wait()


def _receive(group: Collective, source: int, device: torch.device) -> list[tuple[str, Tensor]]:
    sizes = torch.zeros(2, dtype=torch.int64, device=device)
    group.recv(sizes, source=source, tag=_SIZES).wait()
    header, payload = (torch.zeros(int(size), dtype=torch.uint8, device=device) for size in sizes)
    group.recv(header, source=source, tag=_HEADER).wait()
    if payload.numel():
        group.recv(payload, source=source, tag=_PAYLOAD).wait()
    payload = payload.cpu()
    items, at = [], 0
    for name, dtype_name, shape in json.loads(bytes(header.cpu().numpy())):
        dtype = getattr(torch, dtype_name)
        size = prod(shape) * dtype.itemsize
        items.append((name, payload[at : at + size].clone().view(dtype).view(shape)))
        at += size
    return items


LIMIT_BYTES = 1024


def gather_texts(text: str, group: Collective, *, device: torch.device) -> list[str]:
    """Every rank's text, in rank order, each cut to `LIMIT_BYTES`."""
    if group.size == 1:
        return [text]
    raw = text.encode()[:LIMIT_BYTES]
    own = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
    own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else own[:0]
    everyone = torch.empty(group.size * LIMIT_BYTES, dtype=torch.uint8, device=device)
    group.all_gather(everyone, own.to(device)).wait()
    rows = everyone.view(group.size, LIMIT_BYTES).cpu().numpy()
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def gather_lines(lines: Sequence[str], group: Collective, device: torch.device) -> list[list[str]]:
    """Every rank's lines, in rank order, however many; characters beyond ASCII are escaped."""
    text, part = "\n".join(lines).encode("ascii", "backslashreplace").decode(), LIMIT_BYTES
    longest = max(int(length) for length in gather_texts(str(len(text)), group, device=device))
    found = [""] * group.size
    for start in range(0, longest, part):
        parts = gather_texts(text[start : start + part], group, device=device)
        found = [before + more for before, more in zip(found, parts, strict=True)]
    return [text.split("\n") for text in found]


def exchanged(own: Any, group: Collective, device: torch.device) -> list[Any]:
    """What each rank of `group` passed, which JSON can hold, in rank order. All ranks call it."""
    if group.size == 1:
        return [own]
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8).to(device)
    longest = torch.tensor(text.numel(), dtype=torch.int64, device=device)
    group.all_reduce(longest, "max").wait()
    padded = torch.full((int(longest),), ord(" "), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    every = torch.empty(group.size * int(longest), dtype=torch.uint8, device=device)
    group.all_gather(every, padded).wait()
    return [json.loads(bytes(one.cpu().numpy())) for one in every.view(group.size, -1)]
