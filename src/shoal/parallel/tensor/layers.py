"""Layers of which each rank of a group has a part, by the names that the whole layers' parameters have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.errors import LayoutError, UserCodeError
from shoal.models.layers import KeyedDropout
from shoal.parallel.tensor.operators import slice_of
from shoal.topology.refusal import nearest_divisors, nearest_multiples

# Which slice of a dimension a place along `tensor` holds, and why some sizes cannot be split.


@dataclass(frozen=True)
class Cut:
    """`length` numbers from `offset`, held by the places `twins`; of every `block` numbers, where that is given."""

    offset: int
    length: int
    twins: tuple[int, ...]
    block: int | None = None


def uneven_cut(total: int, place: int, size: int) -> Cut:
    """Parts that differ by one at most, the longer ones first: the rule of `torch.tensor_split`. Some may be empty."""
    each, extra = divmod(total, size)
    return Cut(place * each + min(place, extra), each + (place < extra), (place,))


def even_cut(features: int, place: int, size: int, *, what: str, unit: int = 1) -> Cut:
    """Equal parts of whole units (heads of `unit` features, or single features).

    Raises `LayoutError` where `size` does not divide the units; `what` names the layer.
    """
    units = features // unit
    if features % unit or units % size:
        raise LayoutError(_indivisible(what, units, size, noun="features" if unit == 1 else "heads"))
    length = features // size
    return Cut(place * length, length, (place,))


def grouped_cut(features: int, place: int, size: int, *, what: str, unit: int, heads: int) -> Cut:
    """Key or value heads of `unit` features that `heads` query heads share, each group next to the other.

    Where there are fewer of them than places, neighbouring places hold the same one: that of their query heads.
    Raises `LayoutError` where neither number divides the other.
    """
    shared = features // unit
    if features % unit == 0 and shared < size and size % shared == 0:
        copies = size // shared
        first = place // copies * copies
        return Cut(place // copies * unit, unit, tuple(range(first, first + copies)))
    if features % unit or shared % size:
        raise LayoutError(_ungrouped(what, shared, size, heads=heads))
    return even_cut(features, place, size, what=what, unit=unit)


def _indivisible(what: str, units: int, size: int, *, noun: str) -> str:
    sizes = " or ".join(f"tensor={n}" for n in nearest_divisors(units, size))
    others = " or ".join(map(str, nearest_multiples(size, units)))
    return f"{what} has {units} {noun}, which tensor={size} does not divide; nearest: {sizes}, or {others} {noun}"


def _ungrouped(what: str, shared: int, size: int, *, heads: int) -> str:
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (shared % n == 0 or n % shared == 0)]
    below, above = [n for n in fitting if n < size][-1:], [n for n in fitting if n > size][:1]
    sizes = " or ".join(f"tensor={n}" for n in below + above)
    return (
        f"{what} has {shared} heads that the {heads} query heads share; tensor={size} must divide them or be a "
        f"multiple of them; nearest: {sizes}"
    )


# One layer that is to be split: decided first, replaced later, so that a refusal leaves the model as it was.


Cuts = Mapping[int, Cut]
"""By dim; the twins of the first are those of the parameter."""

Replacement = Callable[[nn.Parameter, nn.Parameter | None], nn.Module]


@dataclass(frozen=True)
class SplitLayer:
    """The layer's name, the cuts of its weight and bias, and what takes its place, made of the cut parameters."""

    name: str
    layer: nn.Module
    weight: Cuts
    bias: Cuts
    replacement: Replacement

    def split_parameters(self) -> Iterator[tuple[str, Cuts]]:
        """The full name of each parameter that is split, and how."""
        if self.weight:
            yield f"{self.name}.weight", self.weight
        if self.own_bias is not None and self.bias:
            yield f"{self.name}.bias", self.bias

    @property
    def own_weight(self) -> nn.Parameter:
        """The whole layer's weight."""
        return cast(nn.Parameter, self.layer.weight)

    @property
    def own_bias(self) -> nn.Parameter | None:
        """The whole layer's bias, where it has one."""
        return getattr(self.layer, "bias", None)


def replace(model: nn.Module, layers: Iterable[SplitLayer]) -> None:
    """Puts the parts in place of the whole layers; a parameter of several layers becomes one part for all of them."""
    parts: dict[Tensor, nn.Parameter] = {}
    for split in layers:
        weight, bias = split.own_weight, split.own_bias
        if weight not in parts:
            parts[weight] = _part(weight, split.weight)
        if bias is not None and split.bias:
            bias = _part(bias, split.bias)
        parent, _, child = split.name.rpartition(".")
        setattr(model.get_submodule(parent), child, split.replacement(parts[weight], bias))


def check_ties(layers: Iterable[SplitLayer]) -> None:
    """Raises `UserCodeError` where a parameter belongs to layers that would cut it differently."""
    seen: dict[Tensor, SplitLayer] = {}
    for split in layers:
        other = seen.setdefault(split.own_weight, split)
        if other.weight != split.weight:
            raise UserCodeError(
                f"'{other.name}' and '{split.name}' share their weight, but have roles that split it differently; give "
                f"them roles that cut alike, such as embedding and head, or weights of their own"
            )


def part_of(parameter: Tensor, cuts: Cuts) -> Tensor:
    """The rank's part, with storage of its own.

    Of a packed parameter, the parts of all blocks one after the other: `[blocks x length, in]`, or
    `[blocks, in, length]` where the blocks lie along dim 1.
    """
    own = parameter.detach()
    for dim, cut in cuts.items():
        if cut.block is None:
            own = own.narrow(dim, cut.offset, cut.length)
            continue
        own = own.unflatten(dim, (-1, cut.block)).narrow(dim + 1, cut.offset, cut.length)
        own = own.flatten(0, 1) if dim == 0 else own.movedim(dim, 0)
    return own.contiguous().clone()


def _part(parameter: Tensor, cuts: Cuts) -> nn.Parameter:
    return nn.Parameter(part_of(parameter, cuts), requires_grad=parameter.requires_grad)


Crossing = Callable[[Tensor], Tensor]
"""An operator of `shoal.parallel.tensor.operators`, its group given."""


class Entrance:
    """How the column layers of one module take their input: crossed once for all that get the same tensor.

    It keeps a tensor until as many layers as share it have had it, so that nothing lives longer than the forward.
    """

    def __init__(self, crossing: Crossing, layers: int) -> None:
        self._crossing, self._layers = crossing, layers
        self._kept: tuple[Tensor, bool, Tensor] | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        recording = torch.is_grad_enabled()
        if self._kept is None or self._kept[0] is not x or self._kept[1] != recording:
            self._kept, self._left = (x, recording, self._crossing(x)), self._layers
        inside = self._kept[2]
        self._left -= 1
        if self._left == 0:
            self._kept = None
        return inside


Here = Callable[[nn.Parameter | None], nn.Parameter]
"""From the parameter that a module has registered to what it computes with on this rank."""


class HasParts(nn.Module):
    """A module that computes with parts of parameters: those that it registers, or what `shells` have for them, by
    name, where a script goes on to see the whole ones (`shoal.gradients.split_shells`).
    """

    shells: Mapping[str, Here] = MappingProxyType({})

    def here(self, name: str) -> nn.Parameter | None:
        """This rank's part of the parameter `name`."""
        registered, shell = self._parameters[name], self.shells.get(name)
        return registered if shell is None else shell(registered)


class _PartOfLinear(HasParts):
    """A rank's part of a linear layer. `transposed`: the whole layer's weight is `[in, out]`, else `[out, in]`."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self._transposed = transposed
        self.out_features, self.in_features = self.rows().shape

    def rows(self) -> Tensor:
        """The weight, `[out, in]`."""
        weight = cast(Tensor, self.here("weight"))
        return weight.T if self._transposed else weight


class ColumnLinear(_PartOfLinear):
    """The features `[..., in]` to this rank's part of the outputs: rows of the weight, and the bias of those rows."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, entrance: Crossing, transposed: bool = False
    ) -> None:
        super().__init__(weight, bias, transposed=transposed)
        self.entrance = entrance

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.entrance(x))

    def product(self, x: Tensor) -> Tensor:
        """This rank's part of the outputs, of features that have crossed already."""
        return F.linear(x, self.rows(), self.here("bias"))


class PackedLinear(ColumnLinear):
    """The features `[..., in]` to this rank's part of each block of outputs, the parts side by side: see `part_of`."""

    def rows(self) -> Tensor:
        """The weight, `[blocks x length, in]`."""
        weight = cast(Tensor, self.here("weight"))
        return weight.transpose(1, 2).flatten(0, 1) if self._transposed else weight


class RowLinear(_PartOfLinear):
    """This rank's part of the features to all outputs: columns of the weight; the bias is added once, to the sum."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, leave: Crossing, transposed: bool = False
    ) -> None:
        super().__init__(weight, bias, transposed=transposed)
        self.leave = leave

    def forward(self, x: Tensor) -> Tensor:
        total, bias = self.leave(F.linear(x, self.rows())), self.here("bias")
        return total if bias is None else total + bias.to(total.dtype)


class VocabularyEmbedding(HasParts):
    """Tokens `[batch, seq]` to vectors `[batch, seq, width]`: each rank looks up its own rows, and the sum has all."""

    def __init__(self, weight: nn.Parameter, cut: Cut, *, total: int, padding: int | None, leave: Crossing) -> None:
        super().__init__()
        self.weight, self.cut, self.total, self.leave = weight, cut, total, leave
        self.padding = padding - cut.offset if padding is not None and self._holds(padding) else None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self._own_rows(tokens))

    def _own_rows(self, tokens: Tensor) -> Tensor:
        weight = cast(Tensor, self.here("weight"))
        if self.cut.length == 0:  # still part of the graph, so that this rank takes part in every collective
            return weight.sum() + weight.new_zeros(*tokens.shape, weight.shape[1])
        before, end = self.cut.offset, self.cut.offset + self.cut.length
        others = ((tokens >= 0) & (tokens < before)) | ((tokens >= end) & (tokens < self.total))
        # A token outside the whole vocabulary stays outside here, and fails as it does in the unsplit layer.
        rows = F.embedding((tokens - before).masked_fill(others, 0), weight, padding_idx=self.padding)
        return rows.masked_fill(others[..., None], 0)

    def _holds(self, token: int) -> bool:
        return self.cut.offset <= token < self.cut.offset + self.cut.length


# What sequence parallelism adds to a split model: outside its regions every rank has a slice of each sequence.
#
# Norms, dropout and the residual sum cost nothing twice, and their activations take 1 / size of the memory
# (arXiv:2205.05198). Attention and feed-forward see the whole sequence.


def change_input(region: nn.Module, crossing: Callable[[Tensor], Tensor]) -> None:
    """The first input of `region` is crossed, such as to the whole sequence, for all that the module does with it."""

    def cross_first(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            return (crossing(args[0]), *args[1:]), named
        first = next(iter(named))
        return args, {**named, first: crossing(named[first])}

    region.register_forward_pre_hook(cross_first, with_kwargs=True)


def change_output(region: nn.Module, crossing: Callable[[Tensor], Tensor]) -> None:
    """What `region` gives is crossed on its way back to the stream."""

    def cross(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return crossing(output)

    region.register_forward_hook(cross)


def slice_positions(model: nn.Module, group: Collective, *, inside: Iterable[nn.Module]) -> None:
    """Keyed dropout outside of the regions `inside` drops what it would drop in this rank's slice of whole samples."""
    whole = {id(module) for region in inside for module in region.modules()}

    def add_positions(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        x = args[0] if args else named["x"]
        given = args[1] if len(args) > 1 else named.get("positions")
        return (x, _own_positions(x, given, group)), {}

    for module in model.modules():
        if isinstance(module, KeyedDropout) and id(module) not in whole:
            module.register_forward_pre_hook(add_positions, with_kwargs=True)


def _own_positions(x: Tensor, given: Tensor | None, group: Collective) -> Tensor:
    """The places in their samples of the slice `x` `[batch, seq / size, ...]`, from those of the whole sequences."""
    if given is None:
        first = group.rank * x.shape[1]
        return torch.arange(first, first + x.shape[1], device=x.device)[None]
    return slice_of(given, group)
