"""The state that a replica carries over to the next generation, and its copy to replicas that lack it.

One holder broadcasts first an index, which names the tensors and has a hash of every chunk, and then the chunks. A
receiver checks each chunk against its hash before it uses any of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from shoal.checkpoint.progress import plain
from shoal.comm.collective import Collective
from shoal.engine.state import TrainState
from shoal.errors import CollectiveError
from shoal.state.target import parts_of

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class HeldState:
    """The state of a replica of one rank between two steps: `facts` are JSON, `tensors` whole, by their names."""

    facts: str
    tensors: Mapping[str, Tensor]


class _Entry(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: list[int]
    hashes: list[str]


class _Index(msgspec.Struct, frozen=True):
    facts: str
    entries: list[_Entry]


def held_state(state: TrainState) -> HeldState:
    """What `state` holds, in the memory that it has now."""
    tensors = {name: part.tensor for name, parts in parts_of(state.tensors()).items() for part in parts}
    return HeldState(json.dumps(plain(state.to_json(), "state")), tensors)


def load_state(state: TrainState, held: HeldState) -> None:
    """Makes `state`, that of a new generation, equal to `held`. Raises `CollectiveError` where names differ."""
    facts: dict[str, Any] = json.loads(held.facts)
    state.load_json(facts)
    targets = parts_of(state.targets({name: tensor.dtype for name, tensor in held.tensors.items()}))
    if different := sorted(set(targets) ^ set(held.tensors)):
        raise CollectiveError(
            f"the state of the last generation and this one's differ in {different[0]}: run one version of Shoal and "
            "of the model everywhere"
        )
    with torch.no_grad():
        for name, parts in targets.items():
            for part in parts:
                part.tensor.copy_(held.tensors[name])
    state.restore_extra()


def share_state(held: HeldState | None, group: Collective, *, root: int, device: torch.device) -> HeldState:
    """The state of rank `root` of `group`, on all its ranks; those that pass None get a copy.

    Raises `CollectiveError` for a chunk that is not what its holder had.
    """
    mine = group.rank == root
    index = _index_of(held) if mine and held is not None else None
    index = _broadcast_index(index, group, root=root, device=device)
    received: dict[str, Tensor] = {}
    for entry in index.entries:
        source = held.tensors[entry.name] if held is not None and mine else None
        received[entry.name] = _broadcast_tensor(entry, source, group, root=root, device=device)
    return held if held is not None else HeldState(index.facts, received)


def _index_of(held: HeldState) -> _Index:
    entries = []
    for name, tensor in held.tensors.items():
        hashes = [_hash(chunk) for chunk in _chunks(_bytes_of(tensor))]
        entries.append(_Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashes))
    return _Index(held.facts, entries)


def _broadcast_index(index: _Index | None, group: Collective, *, root: int, device: torch.device) -> _Index:
    body = b"" if index is None else msgspec.json.encode(index)
    size = torch.tensor([len(body)], dtype=torch.int64, device=device)
    group.broadcast(size, root=root).wait()
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    group.broadcast(data, root=root).wait()
    return msgspec.json.decode(data.cpu().numpy().tobytes(), type=_Index)


def _broadcast_tensor(
    entry: _Entry, source: Tensor | None, group: Collective, *, root: int, device: torch.device
) -> Tensor:
    """The tensor itself on `root`, a checked copy elsewhere."""
    if source is None:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
    else:
        tensor = source.detach().contiguous()
    for number, chunk in enumerate(_chunks(_bytes_of(tensor))):
        group.broadcast(chunk, root=root).wait()
        if source is None and _hash(chunk) != entry.hashes[number]:
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
