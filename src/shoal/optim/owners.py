"""Whole tensors on one rank each: what optimizers that work on matrices need, in every layout.

    parts on ranks  --gather-->  the whole tensor on its owner  --its update-->  whole  --scatter-->  parts on ranks

A rank that holds the whole of a tensor can own it without a message. Of several that hold it (replicas that make the
same updates), and of those that hold a part where none holds the whole (tensor parallelism), the one with the least
work so far owns it, dearest tensors first (Graham's LPT rule). So work is divided over replicas, over ZeRO's ranks and
over tensor ranks alike, and what travels is an all-to-all before the work and one after it, bucket by bucket.

Every number has one source, its owner if it holds it, and goes back to all ranks that hold it. Tensors of one dtype
travel together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective, Handle, exchanged
from shoal.optim.declared import Described, Dims, Granularity
from shoal.optim.fused import FusedAdamW, FusedOptimizer, GroupTensors
from shoal.optim.matrix_kinds import is_hidden
from shoal.optim.parts import Parts
from shoal.topology.holding import Box, whole

Cost = Callable[[Dims], float]
"""What the work on a tensor of this shape costs, in any unit."""
BUCKET_NUMEL = 4 << 20
"""Numbers that travel together, about."""


class _Lies(NamedTuple):
    """A box of tensor `name`: the elements from `start` on of what a rank holds of it."""

    name: str
    box: Box
    start: int


class _Flight(NamedTuple):
    """Tensors of one dtype on their way: `buffer` is split over `targets` when they are there; `payload` is kept."""

    handle: Handle
    payload: Tensor
    buffer: Tensor
    targets: Sequence[Tensor]


class Arriving(NamedTuple):
    """Tensors by name, whose numbers are there after `wait`."""

    tensors: dict[str, Tensor]
    flights: Sequence[_Flight] = ()

    def wait(self) -> dict[str, Tensor]:
        """Returns when they have come."""
        for handle, _, buffer, targets in self.flights:
            handle.wait()
            for target, numbers in zip(targets, buffer.split([t.numel() for t in targets]), strict=True):
                target.copy_(numbers.view(target.shape))
        return self.tensors


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
        self.travels = any(
            rank != self.owner[name] for name, sources in self._sources.items() for rank, _ in sources
        ) or any(name in held and self.owner[name] != rank for rank, held in enumerate(self._held) for name in held)
        """Whether anything of a tensor is ever sent: some rank holds a part of one that another owns."""
        names = sorted(self.shapes)
        before = accumulate((prod(self.shapes[name]) for name in names), initial=0)
        self.bucket_of = {name: start // BUCKET_NUMEL for name, start in zip(names, before, strict=False)}
        """Which tensors travel together, by number, so that others may be worked on meanwhile."""

    @property
    def mine(self) -> list[str]:
        """The tensors that this rank owns."""
        return [name for name in sorted(self.shapes) if self.owner[name] == self._group.rank]

    def gather(self, parts: Mapping[str, Tensor]) -> Arriving:
        """`parts` has what this rank holds of each tensor that takes part, which all ranks that hold some of it know;
        the whole ones that it owns.
        """
        me, flat = self._group.rank, {name: part.reshape(-1) for name, part in parts.items()}
        found = {name: self._empty(name, self.shapes[name]) for name in self.mine if name in flat}
        sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        into: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for name in sorted(flat):
            owner = self.owner[name]
            for source, lies in self._sources[name]:
                if source == me and owner == me and _is_all(lies, self.shapes[name]):
                    found[name] = flat[name].view(self.shapes[name])
                    continue
                if source == me:
                    sent[owner].append(_of(flat[name], lies))
                if owner == me:
                    into[source].append(found[name][lies.box.slices])
        return Arriving(found, self._exchange(sent, into))

    def scatter(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> Arriving:
        """The inverse: `tensors` are the whole ones that this rank owns; flat, what it holds of each of `names`, those
        that took part.
        """
        me = self._group.rank
        sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        into: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        found: dict[str, Tensor] = {}
        for name in sorted(names):
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
        return Arriving(found, self._exchange(sent, into))

    def share(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        """`tensors` belong to what this rank holds and takes part; those of the owner, of any shapes, become those of
        all holders. They are in float32, or in the parameters' type where that is wider.
        """
        me = self._group.rank
        sent: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        into: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for name in sorted(tensors):
            owner = self.owner[name]
            for rank, held in enumerate(self._held):
                if rank != owner and name in held:
                    sent[rank] += tensors[name] if me == owner else ()
                    into[owner] += tensors[name] if me == rank else ()
        wide = {torch.promote_types(own, torch.float32) for own in self._dtypes.values()}
        Arriving({}, self._exchange(sent, into, wide)).wait()

    def _exchange(
        self,
        sent: Sequence[Sequence[Tensor]],
        into: Sequence[Sequence[Tensor]],
        dtypes: Collection[torch.dtype] | None = None,
    ) -> list[_Flight]:
        """`sent[r]` become `into[me]` on rank r, when they have arrived. A list is in the same order on both sides.
        `dtypes`: those of the tensors, the same on all ranks; None: those of the parameters.
        """
        me = self._group.rank
        for source, target in zip(sent[me], into[me], strict=True):
            target.copy_(source.view(target.shape))
        flights: list[_Flight] = []
        for dtype in sorted(set(self._dtypes.values()) if dtypes is None else dtypes, key=str) if self.travels else ():
            out = [[t.reshape(-1) for t in one if t.dtype == dtype] if r != me else [] for r, one in enumerate(sent)]
            back = [[t for t in one if t.dtype == dtype] if r != me else [] for r, one in enumerate(into)]
            sizes, wanted = [_numel(one) for one in out], [_numel(one) for one in back]
            payload = torch.cat([torch.empty(0, dtype=dtype, device=self._device), *(t for one in out for t in one)])
            buffer = torch.empty(sum(wanted), dtype=dtype, device=self._device)
            handle = self._group.all_to_all(buffer, payload, output_sizes=wanted, input_sizes=sizes)
            flights.append(_Flight(handle, payload, buffer, [t for one in back for t in one]))
        return flights

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


# The base of optimizers that work on whole matrices, and leave everything else to AdamW.
#
#     d = direction(g)  where the part lies   ->   u = updated(d)  whole, on its owner   ->   x <- (1 - lr w) x - lr u
#
# A subclass says what `d` and `u` are. State of `direction` lies with the part and is divided with it; state of
# `updated` lies whole with the owner (`Slot.whole`), and nowhere else.


class Whole(NamedTuple):
    """A whole matrix on the rank that updates it: its group, its direction and its state."""

    group: dict[str, Any]
    direction: Tensor
    state: dict[str, Any]


class _Moving(NamedTuple):
    """Parts of matrices, by what their updates are multiplied, and directions or updates that come."""

    each: Sequence[GroupTensors]
    scales: Sequence[float]
    arriving: Arriving


class WholeOptimizer(FusedAdamW):
    """Groups that say `whole` go through `direction` and `updated`, others through AdamW.

    Args:
        params: Dictionaries with `params` and their options. Of plain parameters, matrices are `whole`.
        options: Those of groups that do not say them; `betas` and `eps` are AdamW's too.
    """

    works_on: Granularity = "matrices"
    decomposes = False
    """Whether `updated` decomposes matrices, which torch cannot in half types: what it is given, and keeps, is then of
    float32 at least.
    """
    _owners: Owners | None = None

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        FusedOptimizer.__init__(self, _groups(params), **{"whole": False, **options})
        self._shapes: dict[int, Dims] = {}
        self._names: dict[int, str] = {}

    def connect(self, parts: Parts) -> None:
        """Matrices become whole on their owners."""
        self._names = {id(own.parameter): own.name for own in parts.owned}
        self._shapes = {id(own.parameter): own.holding.global_shape for own in parts.owned}
        if parts.equal.size > 1:
            every = [GroupTensors(group, group["params"], group["params"]) for group in self.param_groups]
            whole = {id(p) for one in self.divided(every)[0] for p in one.parameters}
            own = {owned.name for owned in parts.owned if id(owned.parameter) in whole}
            self._owners = Owners(parts, self.cost, wanted=lambda name, shape: name in own)

    @staticmethod
    def group_options(parameter: Described) -> dict[str, Any]:
        """What `optimizer.kind = "python"` asks of a parameter: hidden matrices are `whole`, embeddings are not."""
        return {"whole": is_hidden(parameter)}

    def whole_shape(self, parameter: Parameter) -> Dims | None:
        """That of the whole parameter, if its state is on this rank; None if another rank has it."""
        name = None if self._owners is None else self._owners.names[id(parameter)]
        if self._owners is not None and name in self._owners.owner and name not in self._owners.mine:
            return None
        return self._shapes.get(id(parameter), tuple(parameter.shape))

    def divided(self, work: list[GroupTensors]) -> tuple[list[GroupTensors], list[GroupTensors]]:
        """What is whole, and what is AdamW's."""
        return [one for one in work if one.group["whole"]], [one for one in work if not one.group["whole"]]

    def direction(self, group: dict[str, Any], parameter: Parameter, gradient: Tensor) -> Tensor:
        """What of `gradient` the owner is sent, number by number."""
        return gradient

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """What is subtracted from the whole parameter, times the rate; `state` is the owner's."""
        raise NotImplementedError

    def cost(self, shape: Dims) -> float:
        """What `updated` computes for a parameter of this shape, in any unit."""
        return float(prod(shape))

    def scales(self, parameters: list[Parameter]) -> list[float]:
        """Numbers by which updates are multiplied; they may ask something of whole parameters."""
        return [1.0] * len(parameters)

    def update_all(self, work: list[GroupTensors]) -> None:
        """Updates everything that has a gradient."""
        matrices, others = self.divided(work)
        buckets = self._buckets(
            [GroupTensors(one.group, [p], [g]) for one in matrices for p, g in zip(*one[1:], strict=True)]
        )
        if not self._travels:
            for one in others:
                self.update(*one)
            for bucket in buckets:
                self._apply(self._worked_on(self._sent(bucket)))
            return
        sent = [self._sent(bucket) for bucket in buckets]
        for one in others:
            self.update(*one)
        returned = [self._worked_on(bucket) for bucket in sent]  # each is on its way back while the next is worked on
        for bucket in returned:
            self._apply(bucket)

    @property
    def _travels(self) -> bool:
        return self._owners is not None and self._owners.travels

    def _buckets(self, each: list[GroupTensors]) -> list[list[GroupTensors]]:
        """What of `each`, a matrix or its part, is updated together. All, where matrices ask something of each other.
        By itself, where nothing is sent: its numbers then stay in a cache from the first pass to the last. Else what
        travels together, also where this rank has nothing of it.
        """
        own = type(self)
        if own.updates is not WholeOptimizer.updates or own.scales is not WholeOptimizer.scales:
            return [each]
        if self._owners is None or not self._owners.travels:
            return [[one] for one in each]
        numbers = self._owners.bucket_of
        found: dict[int, list[GroupTensors]] = {number: [] for number in sorted(set(numbers.values()))}
        for one in each:
            found[numbers[self._name_of(one)]].append(one)
        return list(found.values())

    def updates(self, own: Mapping[str, Whole]) -> dict[str, Tensor]:
        """`updated` of every matrix that this rank updates, by name. All ranks call it, whatever they own."""
        return {name: self.updated(one.group, one.direction, one.state) for name, one in own.items()}

    def _sent(self, each: Sequence[GroupTensors]) -> _Moving:
        """Directions of `each`, on their way to the owners."""
        scales = self.scales([one.parameters[0] for one in each])
        parts = {self._name_of(one): self.direction(one.group, *one.parameters, *one.gradients) for one in each}
        return _Moving(each, scales, Arriving(parts) if self._owners is None else self._owners.gather(parts))

    def _worked_on(self, sent: _Moving) -> _Moving:
        """Their updates, on their way back."""
        own, whole = {self._name_of(one): one for one in sent.each}, sent.arriving.wait()
        found = self.updates(
            {n: Whole(own[n].group, self._widened(x), self.state[own[n].parameters[0]]) for n, x in whole.items()}
        )
        found = {name: update.to(whole[name].dtype) for name, update in found.items()}
        return sent._replace(arriving=Arriving(found) if self._owners is None else self._owners.scatter(found, own))

    def _apply(self, returned: _Moving) -> None:
        updates = returned.arriving.wait()
        for one, scale in zip(returned.each, returned.scales, strict=True):
            (p,), lr = one.parameters, one.group["lr"]
            if one.group["weight_decay"]:
                p.mul_(1 - lr * one.group["weight_decay"])
            p.add_(updates[self._name_of(one)].view(p.shape), alpha=-lr * scale)

    def _name_of(self, one: GroupTensors) -> str:
        return self._names.get(id(one.parameters[0]), str(id(one.parameters[0])))

    def _widened(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self.decomposes else x


def as_matrix(x: Tensor) -> Tensor:
    """Dimensions from the second on as columns; a vector as one row, a number as one."""
    return x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)


def _groups(params: Iterable[Any]) -> list[Any]:
    """Groups as they are; of plain parameters, or pairs of them with names, matrices are `whole`, and the rest not."""
    params = list(params)
    if not params or isinstance(params[0], dict):
        return params
    is_matrix = [(p[1] if isinstance(p, tuple) else p).ndim == 2 for p in params]
    matrices, others = ([p for p, own in zip(params, is_matrix, strict=True) if own is kept] for kept in (True, False))
    return [{"params": matrices, "whole": True}, {"params": others}]
