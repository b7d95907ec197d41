"""Masks are decided once, by an owner for each layer, from the scores of all ranks, and broadcast as bits.

    every rank    scores of the weights that it counts, zero elsewhere     --sum-->        owner: the whole layer's
    owner         mask of the whole layer, by the plain functions of `patterns`
    owner         a bit a weight                                           --broadcast-->  every rank

So all ranks hold the same bits, whatever their devices make of near-ties, and no layout has a rule of its own. It costs
a reduction of the weights in a step in which masks change, and memory for one layer at a time. With
`distribution = "global"` an owner keeps the scores of all of its layers, and a radix search finds the threshold of all
ranks' scores from sums of 256 counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.models.roles import AS_IT_IS, Stored
from shoal.sparsity.masks import packed, packed_bytes
from shoal.sparsity.units import UnitGroup
from shoal.state import Owned, is_counted
from shoal.topology.holding import Dims

Values = Callable[[Owned], Tensor]
"""Numbers of a part that this rank's optimizer steps: as many as it has, in its order."""


@dataclass(frozen=True)
class Owners:
    """`owned` are the parts of layers that this rank steps, `shapes` all layers of the unsplit model in its order, the
    same on all ranks of `group`. Numbers are of `dtype`, on `device`. Layers of one of `groups` have one owner; those
    of `stored` are not one matrix `[outputs, inputs, ...]`.
    """

    owned: Sequence[Owned]
    shapes: Mapping[str, Dims]
    group: Collective
    device: torch.device
    dtype: torch.dtype
    groups: Sequence[UnitGroup] = ()
    stored: Mapping[str, Stored] = field(default_factory=dict)

    def form(self, name: str) -> Stored:
        """How the matrices of the layer `name` lie in it."""
        return self.stored.get(name, AS_IT_IS)

    def rows_shape(self, name: str) -> Dims:
        """That of the layer as rows, `[outputs, inputs, ...]`."""
        return self.form(name).rows_shape(self.shapes[name])

    def owns(self, name: str) -> bool:
        """Whether this rank decides the mask of the layer `name`."""
        return self._owner(name) == self.group.rank

    def whole(self, name: str, values: Values) -> Tensor:
        """At its owner, `values` of the whole layer `name`, in its shape; elsewhere undefined. All ranks call it."""
        whole = torch.zeros(self.shapes[name], dtype=self.dtype, device=self.device)
        for own in self.owned:
            first_replica = own.holding.rank == own.holding.across[0]
            if own.name == name and first_replica and is_counted(own):
                put(whole, own, values(own))
        self.group.reduce(whole, root=self._owner(name)).wait()
        return whole

    def share(self, name: str, mask: Tensor | None) -> Tensor:
        """The bits of the layer's mask, which its owner passes and the others do not. All ranks call it."""
        numel = math.prod(self.shapes[name])
        bits = torch.empty(packed_bytes(numel), dtype=torch.uint8, device=self.device) if mask is None else packed(mask)
        self.group.broadcast(bits, root=self._owner(name)).wait()
        return bits

    def largest(self, scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Masks of the units with the largest flat `scores` of all layers, each at its owner, that have `count` weights
        together, but for half a unit; all ranks call it.

        Of equal scores those of the first layer are kept, and of a layer the first.
        """
        keys = {name: _ordered(each) for name, each in scores.items()}
        sizes = {name: math.prod(self.shapes[name]) // len(each) for name, each in keys.items()}
        threshold, above = self._threshold(keys, sizes, count)
        names = list(self.shapes)
        ties = torch.zeros(len(names), dtype=torch.int64, device=self.device)
        for name, each in keys.items():
            ties[names.index(name)] = (each == threshold).sum() * sizes[name]
        self.group.all_reduce(ties).wait()
        before = (ties.cumsum(0) - ties).tolist()
        found = {}
        for name, each in keys.items():
            kept, left = each > threshold, count - above - before[names.index(name)]
            kept[(each == threshold).nonzero().flatten()[: max(0, round(left / sizes[name]))]] = True
            found[name] = kept
        return found

    def _threshold(self, keys: Mapping[str, Tensor], sizes: Mapping[str, int], count: int) -> tuple[int, int]:
        """(the key at which all ranks' largest have `count` weights, how many larger ones have), a byte at a time from
        the highest on. A unit of a layer has so many weights as `sizes` say.
        """
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        mine = torch.cat([none, *keys.values()])
        weights = torch.cat([none, *(torch.full_like(each, sizes[name]) for name, each in keys.items())])
        threshold, above = 0, 0
        for shift in range(24, -1, -8):
            counts = torch.bincount((mine >> shift) & 255, weights.double(), minlength=256).long()
            self.group.all_reduce(counts).wait()
            from_top = counts.flip(0).cumsum(0).tolist()
            place = next(i for i, total in enumerate(from_top) if above + total >= count)
            above += from_top[place - 1] if place else 0
            threshold |= (255 - place) << shift
            there = ((mine >> shift) & 255) == 255 - place
            mine, weights = mine[there], weights[there]
        return threshold, above

    def _owner(self, name: str) -> int:
        leader = next((group.leader for group in self.groups if name in group.dims), name)
        return list(self.shapes).index(leader) % self.group.size


def put(whole: Tensor, own: Owned, values: Tensor) -> None:
    """Writes the `values` of a part into the whole layer."""
    flat = values.reshape(-1)
    for region in own.regions:
        numbers = flat[region.start : region.start + region.box.numel]
        whole[region.box.slices] = numbers.view(region.box.shape).to(whole.dtype)


def taken(whole: Tensor, own: Owned) -> Tensor:
    """What of the whole layer is the part `own`, in the shape of its parameter."""
    flat = torch.empty(own.parameter.numel(), dtype=whole.dtype, device=whole.device)
    for region in own.regions:
        flat[region.start : region.start + region.box.numel] = whole[region.box.slices].reshape(-1)
    return flat.view(own.parameter.shape)


def _ordered(scores: Tensor) -> Tensor:
    """int64 keys from 0 to 2^32 - 1 in the order of the scores, rounded to float32 (IEEE 754: the bits of positive
    numbers are in their order, those of negative ones in the opposite)."""
    bits = (scores.float() + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -1 - bits, bits + 2**31)
