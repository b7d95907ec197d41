"""Whole tensors on one rank each: what optimizers that work on matrices need, in every layout.

    parts on ranks  --gather-->  the whole tensor on its owner  --its update-->  whole  --scatter-->  parts on ranks

A rank that holds the whole of a tensor can own it without a message. Of several that hold it (replicas that make the
same updates), and of those that hold a part where none holds the whole (tensor parallelism), the one with the least
work so far owns it, dearest tensors first (Graham's LPT rule). So work is divided over replicas, over ZeRO's ranks and
over tensor ranks alike, and what travels is one all-to-all before the work and one after it.

Every number has one source, its owner if it holds it, and goes back to all ranks that hold it. Tensors of one dtype
travel together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.optim.declared import Dims
from shoal.optim.parts import Parts, exchanged
from shoal.topology.box import Box, whole

Cost = Callable[[Dims], float]
"""What the work on a tensor of this shape costs, in any unit."""


class _Lies(NamedTuple):
    """A box of tensor `name`: the elements from `start` on of what a rank holds of it."""

    name: str
    box: Box
    start: int


class Owners:
    """Which rank owns which tensor, and what each sends. All ranks of `parts.equal` make it, and call it, together.

    `cost` says which ranks have much to do; `wanted` which of the tensors are taken up, by name and shape.
    """

    def __init__(self, parts: Parts, cost: Cost, *, wanted: Callable[[str, Dims], bool]) -> None:
        self._group: Collective = parts.equal
        self._device = parts.device
        self.names = {id(own.parameter): own.name for own in parts.owned}
        """Names of this rank's parts, by the id of the parameter."""
        own = [
            [o.name, list(o.holding.global_shape), str(o.parameter.dtype).removeprefix("torch."),
             [[r.box.offset, r.box.shape, r.start] for r in o.regions]]
            for o in parts.owned
            if wanted(o.name, o.holding.global_shape)
        ]  # fmt: skip
        every = exchanged(own, self._group, self._device)
        self.shapes: dict[str, Dims] = {}
        """Of all tensors that are taken up, on whichever rank they lie."""
        self._dtypes: dict[str, torch.dtype] = {}
        self._held: list[dict[str, list[_Lies]]] = [_held(rows, self.shapes, self._dtypes) for rows in every]
        self.owner = _owners(self._held, self.shapes, cost)
        """The rank of the group that owns each tensor."""
        self._sources = {name: self._sources_of(name) for name in self.shapes}
        self._travels = any(
            rank != self.owner[name] for name, sources in self._sources.items() for rank, _ in sources
        ) or any(name in held and self.owner[name] != rank for rank, held in enumerate(self._held) for name in held)

    @property
    def mine(self) -> list[str]:
        """The tensors that this rank owns."""
        return [name for name in sorted(self.shapes) if self.owner[name] == self._group.rank]

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`parts` has what this rank holds of each tensor (zeros where it has nothing); the whole ones that it owns."""
        found = {
            name: torch.empty(self.shapes[name], dtype=self._dtypes[name], device=self._device) for name in self.mine
        }
        me = self._group.rank
        flat = {name: part.reshape(-1) for name, part in parts.items()}
        for name, held in self._held[me].items():
            if name not in flat:  # what no sample of a step has used
                flat[name] = self._empty(name, (sum(lies.box.numel for lies in held),)).zero_()
        sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        into: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for name in sorted(self.shapes):
            for source, lies in self._sources[name]:
                owner = self.owner[name]
                if source == me and owner == me and _is_all(lies, self.shapes[name]):
                    found[name] = flat[name].view(self.shapes[name])
                    continue
                if source == me:
                    sent[owner].append(_of(flat[name], lies))
                if owner == me:
                    into[source].append(found[name][lies.box.slices])
        self._exchange(sent, into)
        return found

    def scatter(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse: `tensors` are the whole ones that this rank owns; flat, what it holds of each."""
        me = self._group.rank
        sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        into: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        found: dict[str, Tensor] = {}
        for name in sorted(self.shapes):
            owner = self.owner[name]
            for rank, held in enumerate(self._held):
                for lies in held.get(name, ()):
                    if rank == me and owner == me and _is_all(lies, self.shapes[name]):
                        found[name] = tensors[name].reshape(-1)
                        continue
                    if owner == me:
                        sent[rank].append(tensors[name][lies.box.slices])
                    if rank == me:
                        if name not in found:
                            found[name] = self._empty(name, (sum(one.box.numel for one in held[name]),))
                        into[owner].append(_of(found[name], lies))
        self._exchange(sent, into)
        return found

    def share(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """`tensors` belong to what this rank holds; those of the owner, of any shapes, become those of all holders.
        They are in float32, or in the parameters' type where that is wider.
        """
        me = self._group.rank
        sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        into: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for name in sorted(self.shapes):
            owner = self.owner[name]
            for rank, held in enumerate(self._held):
                if rank != owner and name in held:
                    sent[rank] += tensors[name] if me == owner else ()
                    into[owner] += tensors[name] if me == rank else ()
        self._exchange(sent, into, {torch.promote_types(own, torch.float32) for own in self._dtypes.values()})

    def _exchange(
        self,
        sent: Sequence[Sequence[Tensor]],
        into: Sequence[Sequence[Tensor]],
        dtypes: Collection[torch.dtype] | None = None,
    ) -> None:
        """`sent[r]` become `into[me]` on rank r. A list is in the same order on both sides. `dtypes`: those of the
        tensors, the same on all ranks; None: those of the parameters.
        """
        me = self._group.rank
        for source, target in zip(sent[me], into[me], strict=True):
            target.copy_(source.view(target.shape))
        if not self._travels:
            return
        handles: list[tuple[Handle, Tensor, Tensor, list[Tensor]]] = []
        for dtype in sorted(set(self._dtypes.values()) if dtypes is None else dtypes, key=str):
            out = [[t.reshape(-1) for t in one if t.dtype == dtype] if r != me else [] for r, one in enumerate(sent)]
            back = [[t for t in one if t.dtype == dtype] if r != me else [] for r, one in enumerate(into)]
            sizes, wanted = [_numel(one) for one in out], [_numel(one) for one in back]
            payload = torch.cat([torch.empty(0, dtype=dtype, device=self._device), *(t for one in out for t in one)])
            buffer = torch.empty(sum(wanted), dtype=dtype, device=self._device)
            handle = self._group.all_to_all(buffer, payload, output_sizes=wanted, input_sizes=sizes)
            handles.append((handle, payload, buffer, [t for one in back for t in one]))
        for handle, _, buffer, targets in handles:
            handle.wait()
            at = 0
            for target in targets:
                target.copy_(buffer[at : at + target.numel()].view(target.shape))
                at += target.numel()

    def _empty(self, name: str, shape: Dims) -> Tensor:
        return torch.empty(shape, dtype=self._dtypes[name], device=self._device)

    def _sources_of(self, name: str) -> list[tuple[int, _Lies]]:
        """Every number of a tensor once: (rank, where it lies there)."""
        found: dict[Box, tuple[int, _Lies]] = {}
        owner = self.owner[name]
        for rank in (owner, *(r for r in range(self._group.size) if r != owner)):
            for lies in self._held[rank].get(name, ()):
                found.setdefault(lies.box, (rank, lies))
        return [found[box] for box in sorted(found, key=lambda box: box.offset)]


def _held(rows: Sequence[Any], shapes: dict[str, Dims], dtypes: dict[str, torch.dtype]) -> dict[str, list[_Lies]]:
    """What one rank holds, by name; shapes and dtypes are added to those that are known."""
    held: dict[str, list[_Lies]] = defaultdict(list)
    for name, shape, dtype, regions in rows:
        shapes[name], dtypes[name] = tuple(shape), getattr(torch, dtype)
        for offset, extent, start in regions:
            held[name].append(_Lies(name, Box(tuple(offset), tuple(extent)), start))
    return held


def _owners(held: Sequence[Mapping[str, Sequence[_Lies]]], shapes: Mapping[str, Dims], cost: Cost) -> dict[str, int]:
    """Dearest first, each to the rank with the least to do of those that hold the whole, or else a part."""
    load, found = [0.0] * len(held), {}
    for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), name)):
        whole_at = [r for r, own in enumerate(held) if any(_is_all(lies, shapes[name]) for lies in own.get(name, ()))]
        able = whole_at or [rank for rank, own in enumerate(held) if name in own]
        rank = min(able, key=lambda rank: (load[rank], rank))
        load[rank] += cost(shapes[name])
        found[name] = rank
    return found


def _is_all(lies: _Lies, shape: Dims) -> bool:
    return lies.box == whole(shape)


def _of(flat: Tensor, lies: _Lies) -> Tensor:
    return flat[lies.start : lies.start + lies.box.numel].view(lies.box.shape)


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)
