"""The state that a rank carries over to the next generation, and its copy to replicas that lack it.

Ranks at the same place in their replicas hold the same parts of the state. One of them broadcasts first an index, which
names the parts and has a hash of every chunk, and then the chunks. A receiver checks each chunk against its hash before
it uses any of them. What is a rank's alone, as the gradients that error feedback has not sent yet, stays where it is: a
newcomer begins with none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from shoal.checkpoint.manifest import plain
from shoal.comm.collective import Collective
from shoal.engine.state import TrainState
from shoal.errors import CollectiveError
from shoal.gradients.residuals import as_own, is_own
from shoal.state import Target, parts_of
from shoal.topology.holding import Box, intersection

CHUNK_BYTES = 16 << 20
_OF_REPLICA = re.compile(r"\breplica-\d+/")


@dataclass(frozen=True)
class HeldState:
    """What one rank holds between two steps: `facts` are JSON, `tensors` the parts of each tensor that are here.

    `ahead`: only the part of this rank, which serves others or works for servers; parts that are served are so many
    steps ahead of `facts`. None: all that a replica has.
    """

    facts: str
    tensors: Mapping[str, Sequence[Target]]
    ahead: int | None = None

    @property
    def step(self) -> int:
        """The state is that after this step."""
        return int(json.loads(self.facts)["step"])

    def copied(self) -> HeldState:
        """The same in memory of its own."""
        own = {
            name: [part._replace(tensor=part.tensor.detach().clone()) for part in parts]
            for name, parts in self.tensors.items()
        }
        return replace(self, tensors=own)

    def pieces(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors below `prefix`, each under its name and place."""
        return {
            f"{name}@{tuple(part.offset)}": part.tensor
            for name, parts in self.tensors.items()
            if name.startswith(prefix)
            for part in parts
        }


class Entry(msgspec.Struct, frozen=True):
    """A part of a tensor that is about to be sent, and the hashes of its chunks."""

    name: str
    dtype: str
    global_shape: list[int]
    offset: list[int]
    shape: list[int]
    hashes: list[str]

    @property
    def box(self) -> Box:
        """Which part it is."""
        return Box(tuple(self.offset), tuple(self.shape))

    @property
    def of_dtype(self) -> torch.dtype:
        """That of its numbers."""
        return getattr(torch, self.dtype)


class Index(msgspec.Struct, frozen=True):
    """What one rank sends: the facts of its state, and its parts in order."""

    facts: str
    entries: list[Entry]


def held_state(state: TrainState) -> HeldState:
    """What `state` holds, in the memory that it has now. What is a replica's or a rank's own loses its number."""
    found = {name: parts for name, parts in parts_of(state.tensors()).items() if parts}
    parts = {as_own(_OF_REPLICA.sub("replica-0/", name)): parts for name, parts in found.items()}
    return HeldState(json.dumps(plain(state.to_json(), "state")), parts)


def load_state(state: TrainState, held: HeldState) -> None:
    """Makes `state`, that of a new generation, equal to `held`.

    Raises `CollectiveError` where `held` lacks a part of it: then a replica is split in another way.
    """
    facts: dict[str, Any] = json.loads(held.facts)
    state.load_json(facts)
    dtypes = {name: parts[0].tensor.dtype for name, parts in held.tensors.items()}
    targets = parts_of(state.targets(dtypes))
    missing = sorted({name for name in held.tensors if name.startswith("model/")} - set(targets))
    with torch.no_grad():
        missing += [
            name
            for name, parts in targets.items()
            if not all(filled(part, held.tensors.get(name, ())) for part in parts)
        ]
    if missing:
        raise CollectiveError(
            f"the state of the last generation and this one's differ in {missing[0]}: run one version of Shoal and "
            "of the model everywhere"
        )
    state.pack()
    state.gather()
    state.restore_extra()


def filled(part: Target, sources: Sequence[Target]) -> bool:
    """Whether `sources` had all of `part`, which they then fill."""
    left = part.tensor.numel()
    for source in sources if left else ():
        box = intersection(part.box, source.box) if source.global_shape == part.global_shape else None
        if box is not None:
            there = source.tensor[box.relative_to(source.offset).slices]
            part.tensor[box.relative_to(part.offset).slices].copy_(there)
            left -= box.numel
    return left == 0


def share_state(held: HeldState | None, group: Collective, *, root: int, device: torch.device) -> HeldState:
    """The state of rank `root` of `group`, on all its ranks; those that pass None get a copy.

    Raises `CollectiveError` for a chunk that is not what its holder had.
    """
    index = share_index(held, group, root=root, device=device)
    sources = sources_of(held if group.rank == root else None)
    received: dict[str, list[Target]] = {}
    for entry in index.entries:
        source = next(sources, None)
        if held is not None:
            _pass_on(entry, source, group, root=root, device=device)
            continue
        received.setdefault(entry.name, []).append(share_part(entry, source, group, root=root, device=device))
    return held if held is not None else HeldState(index.facts, received)


def share_index(held: HeldState | None, group: Collective, *, root: int, device: torch.device) -> Index:
    """What `root` is about to send of what it holds, on all ranks of `group`."""
    index = _index_of(held) if group.rank == root and held is not None else None
    return _broadcast_index(index, group, root=root, device=device)


def sources_of(held: HeldState | None) -> Iterator[Target]:
    """The parts in `held` that others may have, in the order of its index; none of a rank that sends nothing."""
    return iter([part for _, part in _shared_parts(held)] if held is not None else ())


def _shared_parts(held: HeldState) -> list[tuple[str, Target]]:
    """Those that are not one rank's alone, each with its tensor's name."""
    return [(name, part) for name, parts in held.tensors.items() if not is_own(name) for part in parts]


def share_part(entry: Entry, source: Target | None, group: Collective, *, root: int, device: torch.device) -> Target:
    """The part `entry` of rank `root`, which has it as `source`; a checked copy on the others.

    Raises `CollectiveError` for a chunk that is not what its holder had.
    """
    if source is not None:
        _pass_on(entry, source, group, root=root, device=device)
        return source
    tensor = _receive_tensor(entry, group, root=root, device=device)
    return Target(tensor, tuple(entry.global_shape), tuple(entry.offset))


def _index_of(held: HeldState) -> Index:
    entries = []
    for name, part in _shared_parts(held):
        tensor, hashes = part.tensor, [_hash(chunk) for chunk in _chunks(_bytes_of(part.tensor))]
        dtype = str(tensor.dtype).removeprefix("torch.")
        whole, offset = list(part.global_shape), list(part.offset)
        entries.append(Entry(name, dtype, whole, offset, list(tensor.shape), hashes))
    return Index(held.facts, entries)


def _broadcast_index(index: Index | None, group: Collective, *, root: int, device: torch.device) -> Index:
    body = b"" if index is None else msgspec.json.encode(index)
    size = torch.tensor([len(body)], dtype=torch.int64, device=device)
    group.broadcast(size, root=root).wait()
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    group.broadcast(data, root=root).wait()
    return msgspec.json.decode(data.cpu().numpy().tobytes(), type=Index)


def _pass_on(entry: Entry, source: Target | None, group: Collective, *, root: int, device: torch.device) -> None:
    """A holder's part in the broadcast of a tensor. One that is not `root` drops what it gets, chunk by chunk."""
    if source is not None:
        for chunk in _chunks(_bytes_of(source.tensor)):
            group.broadcast(chunk, root=root).wait()
        return
    dtype = entry.of_dtype
    left = math.prod(entry.shape) * dtype.itemsize
    dropped = torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8, device=device)
    while left:
        size = min(left, CHUNK_BYTES)
        group.broadcast(dropped[:size], root=root).wait()
        left -= size


def _receive_tensor(entry: Entry, group: Collective, *, root: int, device: torch.device) -> Tensor:
    """A checked copy of the tensor that `root` holds."""
    tensor = torch.empty(entry.shape, dtype=entry.of_dtype, device=device)
    for number, chunk in enumerate(_chunks(_bytes_of(tensor))):
        group.broadcast(chunk, root=root).wait()
        if _hash(chunk) != entry.hashes[number]:
            raise CollectiveError(
                f"chunk {number} of {entry.name} did not arrive as its holder sent it: check the network and the "
                "memory of both hosts"
            )
    return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _chunks(data: Tensor) -> Iterator[Tensor]:
    yield from data.split(CHUNK_BYTES) if data.numel() else ()


def _hash(chunk: Tensor) -> str:
    return blake3(chunk.cpu().numpy().data).hexdigest()
