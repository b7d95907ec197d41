"""`Masks`: which weights of a model are kept, a bit each, the same on every rank.

`bits[name]` is uint8 `[ceil(numel / 8)]`, the mask of the whole parameter `name` of the unsplit model, row by row, the
first weight in the lowest bit. A rank has the bits of the parameters that it has a part of, whatever that part is: they
are a 32nd of the weights, so that masks need no sharding, a checkpoint of one layout is one of all, and a mask is
broadcast as it is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, Segment
from shoal.errors import ConfigError, UsageError
from shoal.models.roles import AS_IT_IS, Stored
from shoal.state import Owned, is_counted
from shoal.topology.holding import Box, Dims, Holding


def packed(mask: Tensor) -> Tensor:
    """The bits of a mask of any shape, uint8 `[ceil(numel / 8)]`."""
    flat = torch.zeros(packed_bytes(mask.numel()) * 8, dtype=torch.uint8, device=mask.device)
    flat[: mask.numel()] = mask.reshape(-1)
    return (flat.view(-1, 8) << _places(mask.device)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, shape: Dims) -> Tensor:
    """The mask of `shape` that `packed` gave `bits` of."""
    numel = torch.Size(shape).numel()
    return (bits[:, None] >> _places(bits.device) & 1).view(-1)[:numel].bool().view(shape)


def packed_bytes(numel: int) -> int:
    """Bytes of a mask of so many weights."""
    return -(-numel // 8)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@dataclass
class Masks:
    """`version` counts changes. `all_sent`: in this step gradients of masked weights are wanted, too. `frozen` are the
    parameters that have no gradient in this step.
    """

    bits: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    all_sent: bool = False
    frozen: frozenset[str] = frozenset()

    def whole(self, name: str, shape: Dims) -> Tensor | None:
        """The mask of the whole parameter of `shape`; None where there is none yet, and everything is kept."""
        bits = self.bits.get(name)
        return None if bits is None else unpacked(bits, shape)

    def held(self, name: str, shape: Dims, boxes: Sequence[Box]) -> Tensor | None:
        """That of the parts `boxes` of it, one after the other, flat."""
        whole = self.whole(name, shape)
        return None if whole is None else torch.cat([whole[box.slices].reshape(-1) for box in boxes])


# Units that can be taken out of a model, each with all layers that make or read it (`shoal.models.roles`).
#
#     feature   gate, up [features, width]: a row each               down [width, features]: a column each
#     head      query, key, value [heads x size, width]: some rows   output [width, heads x size]: as many columns
#     expert    gate, up, down [experts, ...] and the router [experts, width]: a slice each
#
# Masked together over all of them, a feature or head computes nothing, and can be taken out: layers get smaller, and
# every device computes less. A key head goes with the query heads that share it. A masked expert would still be chosen
# by its router: experts are taken out, or stay.


@dataclass(frozen=True)
class UnitGroup:
    """The layers that share `size` units, each with the dim along which these lie, of one length in a layer. Weights of
    those in `turned` have inputs before outputs.
    """

    dims: Mapping[str, int]
    size: int
    turned: frozenset[str] = frozenset()

    @property
    def leader(self) -> str:
        """The first of them, whose owner decides for all."""
        return next(iter(self.dims))


def unit_groups(
    shapes: Mapping[str, Dims],
    kinds: Mapping[str, str],
    *,
    pattern: str,
    heads: int | None = None,
    stored: Mapping[str, Stored] = MappingProxyType({}),
) -> list[UnitGroup]:
    """The groups that the layers of `shapes` make, by the modules that hold them; `kinds` are their roles. `heads`, for
    `pattern = "heads"`: how many key heads there are. `stored`: see `Owners`.

    Raises `ConfigError` for a layer that is in no group.
    """
    by_module: dict[str, list[str]] = {}
    for name in shapes:
        by_module.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    found = []
    for names in by_module.values():
        made = {name: kinds[name] == "column" for name in names if kinds[name] in ("column", "row")}
        turned = frozenset(name for name in made if stored.get(name, AS_IT_IS).turned)
        dims = {name: int(made[name] == (name in turned)) for name in made}
        lengths = {shapes[name][dim] for name, dim in dims.items()}
        sizes = lengths if heads is None else {heads}
        divided = all(length % size == 0 for length in lengths for size in sizes)
        if len(dims) < len(names) or len(sizes) != 1 or set(made.values()) != {True, False} or not divided:
            example = "*.attention.*" if heads else "*.feed_forward.*"
            raise ConfigError(
                f'sparsity.pattern = "{pattern}": {names[0]} is not of layers that make and read the same {pattern}, '
                f'declared as "column" and "row"; name those in sparsity.layers, such as "{example}"'
            )
        found.append(UnitGroup(dims, sizes.pop(), turned))
    return found


def expert_groups(shapes: Mapping[str, Dims]) -> list[UnitGroup]:
    """The stacked experts of each mixture, with its router, by the names of all tensors of a model.

    Raises `UsageError` for experts that are not weights `[experts, ..., ...]`, with biases `[experts, ...]`.
    """
    found: dict[str, dict[str, int]] = {}
    for name in shapes:
        mixture, stacked, _ = name.partition(".experts.")
        if stacked:
            found.setdefault(mixture, {})[name] = 0
    groups = []
    for mixture, dims in found.items():
        size = next((shapes[name][0] for name in dims if len(shapes[name]) == 3), None)
        other = next((name for name in dims if len(shapes[name]) < 2 or shapes[name][0] != size), None)
        if size is None or other is not None:
            name = other or next(iter(dims))
            raise UsageError(
                f"{name} of {list(shapes[name])} does not hold one expert a row of its first dimension, as a layer "
                "[experts, ..., ...] does: only such experts can be taken out"
            )
        routers = [n for n in shapes if n.startswith((f"{mixture}.router.", f"{mixture}.gate.")) and shapes[n]]
        dims |= {name: 0 for name in routers if shapes[name][0] == size}
        groups.append(UnitGroup(dims, size))
    return groups


def unit_scores(group: UnitGroup, scores: Mapping[str, Tensor]) -> Tensor:
    """The score of each unit `[size]`: the mean over all weights that make or read it."""
    parts = [scores[name].transpose(0, dim).reshape(group.size, -1) for name, dim in group.dims.items()]
    return torch.cat(parts, dim=1).mean(1)


def unit_mask(kept: Tensor, dim: int, shape: Dims) -> Tensor:
    """The mask of a layer whose units lie along `dim`."""
    each = kept.repeat_interleave(shape[dim] // kept.numel())
    return each.view(*(-1 if place == dim else 1 for place in range(len(shape)))).expand(shape)


def kept_units(group: UnitGroup, masks: Mapping[str, Tensor]) -> Tensor:
    """The units `[size]` of which a mask keeps something."""
    parts = [masks[name].transpose(0, dim).reshape(group.size, -1).any(1) for name, dim in group.dims.items()]
    return torch.stack(parts).any(0)


def shrunk(
    weights: Mapping[str, Tensor], groups: Sequence[UnitGroup], kept: Sequence[Tensor]
) -> tuple[dict[str, Tensor], int]:
    """The weights of the model with the `kept` units `[size]` of each group alone, biases as well, and how many that
    is.

    Raises `UsageError` where groups would differ: a model has one number of them.
    """
    left = {int(each.sum()) for each in kept}
    if len(left) != 1:
        raise UsageError(
            f"blocks would have from {min(left)} to {max(left)} of them, and this model has one number: prune with "
            'sparsity.distribution = "uniform"'
        )
    found = dict(weights)
    for group, units in zip(groups, kept, strict=True):
        for name, dim in group.dims.items():
            places = units.repeat_interleave(weights[name].shape[dim] // group.size).nonzero().flatten()
            found[name] = weights[name].index_select(dim, places).contiguous()
            bias = f"{name.removesuffix('.weight')}.bias"
            if (dim == 1) == (name in group.turned) and bias in weights and bias not in group.dims:
                found[bias] = weights[bias].index_select(0, places).contiguous()
    return found, left.pop()


# Masks are decided once, by an owner for each layer, from the scores of all ranks, and broadcast as bits.
#
#     every rank    scores of the weights that it counts, zero elsewhere     --sum-->        owner: the whole layer's
#     owner         mask of the whole layer, by the plain functions of `changes`
#     owner         a bit a weight                                           --broadcast-->  every rank
#
# So all ranks hold the same bits, whatever their devices make of near-ties, and no layout has a rule of its own. It
# costs a reduction of the weights in a step in which masks change, and memory for one layer at a time. With
# `distribution = "global"` an owner keeps the scores of all of its layers, and a radix search finds the threshold of
# all ranks' scores from sums of 256 counts.


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


# An all-reduce of what masks and freezing leave of a gradient: a bucket's kept numbers, one after the other.
#
# All ranks have the same masks, and so agree without a word on which numbers are sent: bytes fall with the density, and
# no index travels. The sum of what is masked is zero.


@dataclass(frozen=True)
class PackedBy:
    """Makes exchanges of the numbers that `masks` keep; `holdings` are those of this rank's masked parameters."""

    masks: Masks
    holdings: Mapping[str, Holding]
    by_microbatch = False

    def __call__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment] = (), /) -> MaskedAllReduce:
        return MaskedAllReduce(group, buffer, segments, masks=self.masks, holdings=self.holdings)


class MaskedAllReduce(AllReduce):
    """The sum over `group` of the numbers that are kept, in place."""

    def __init__(
        self,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        *,
        masks: Masks,
        holdings: Mapping[str, Holding],
    ) -> None:
        super().__init__(group, buffer, segments)
        self._segments, self._masks, self._holdings = segments, masks, holdings
        self._version, self._kept = (-1, False), torch.zeros(0, dtype=torch.int64)
        self._sent: Tensor | None = None

    @property
    def payload_bytes(self) -> int:
        """Bytes of what a rank has to say."""
        kept = self._indices()
        return self.result.nbytes if kept is None else kept.numel() * self.result.element_size()

    def send(self, buffer: Tensor) -> None:
        kept = self._indices() if self.group.size > 1 else None
        self._sent = None if kept is None else buffer[kept]
        super().send(buffer if self._sent is None else self._sent)

    def wait(self) -> None:
        super().wait()
        if self._sent is not None:
            self.result.zero_()
            self.result[self._kept] = self._sent
            self._sent = None

    def _indices(self) -> Tensor | None:
        """Places of the buffer that are kept; None where all are sent."""
        if not self._masks.frozen and (self._masks.all_sent or not self._masks.bits):
            return None
        version = (self._masks.version, self._masks.all_sent)
        if self._version != version:
            self._version, self._kept = version, self._found()
        return self._kept

    def _found(self) -> Tensor:
        kept = torch.ones(self.result.numel(), dtype=torch.bool, device=self.result.device)
        for segment in self._segments:
            holding = self._holdings.get(segment.name)
            if segment.name in self._masks.frozen:
                kept[segment.slice] = False
                continue
            if holding is None or self._masks.all_sent:
                continue
            mask = self._masks.held(segment.name, holding.global_shape, holding.boxes)
            if mask is not None:
                kept[segment.slice] = mask[segment.skipped : segment.skipped + segment.numel]
        return kept.nonzero().flatten()
