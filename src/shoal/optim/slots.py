"""An optimizer's state as named tensors: `exp_avg/layers.0.weight`. What checkpoints save and load.

The names are those of the parameters in the unsplit model. The tensors are what lies on this rank: of a sharded
parameter (a `DTensor`) its local part. Of a slot in 8 bits they are the numbers that it stands for, in float32 and in
memory of their own: blocks begin where a rank's part does, and so only numbers can be divided otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

from shoal.errors import UsageError
from shoal.optim.declared import BLOCK, Dims, Slot
from shoal.optim.fused import FusedOptimizer, StateHome

# Dynamic blockwise quantisation: a vector in 8 bits a number, with one float32 scale for each block of `BLOCK`.
#
#     scale s = max |x| over the block, `TINIEST` at least;    code = the level whose value is nearest to x / s
#
# The values of D decades, level j in decade k, 2^k <= j < 2^(k+1):
#
#     10^(k + 1 - D) (0.9 (j + 1/2) / 2^k - 0.8),    level 0 is 0, the last one 1
#
# so that each decade has twice as many values as the one below it, in the middle of as many equal parts of it (dynamic
# tree quantisation: Dettmers, arXiv:1511.04561; Dettmers et al., arXiv:2110.02861). Numbers with signs have 7 decades
# and a sign; others, as the paper proposes, the sign's bit for twice as many values. Three things differ from the
# paper:
#
#   both signs end at 1, and the paper's at 0.993 and 1. So the largest number of a block is its scale exactly, and what
#   was decoded is encoded as it was: a checkpoint may hold decoded numbers
#   numbers without sign have an eighth decade, of one value, for the levels that this leaves
#   of these, only 0 becomes 0. A second moment that became 0 beside a first that did not would make a step of m / eps
#   (arXiv:2309.01507 calls it the zero-point problem)
#
# `TINIEST` keeps all products of scales and values normal float32 numbers. Blocks whose largest number is below it have
# it as their scale. Blocks of 256 cost 1.6 % in scales, and are what ZeRO does not cut; the paper's of 2,048 cost 0.2
# %, and an outlier in one spoils eight times as many numbers.


DECADES = {torch.int8: 7, torch.uint8: 8}
"""By the dtype of the codes: numbers with signs, and numbers that are at least 0."""
TINIEST = 2.0**-101
"""Its product with the least value, 5.5e-8 > 2^-25, is above the least normal number, 2^-126."""
_FORM_DECADES = 8


class Map(NamedTuple):
    """Float32 `values` `[256]` by code, those of negative ones last, and `borders`, `[254]` or `[255]`, ascending.

    A number has a level for each border below it; of a map with signs, the middle one is 0.
    """

    values: Tensor
    borders: Tensor


class Form(NamedTuple):
    """What finds the level of a number y from 0 to 1 without a table, as the kernel does; float32.

    y is in decade k if it is above `border[k]` and not above the next; up to `border[0]` it is 0, and above `top` 1.
    Its level is then the whole part of y `slope[k]` + 2^k 8/9, or the last one in the decade on that side. `power[k]`
    are the powers of ten.
    """

    power: Tensor
    border: Tensor
    slope: Tensor
    top: Tensor

    def packed(self) -> Tensor:
        """Float32 `[26]`, for the kernel."""
        rows = torch.zeros(3, _FORM_DECADES)
        rows[:, : len(self.power)] = torch.stack([self.power, self.border, self.slope])
        return torch.cat([rows.view(-1), self.top.view(1), torch.tensor([TINIEST])])

    def levels(self, y: Tensor) -> Tensor:
        """The level of each number, int32."""
        most = (1 << len(self.power)) - 1
        decade = torch.bucketize(y, self.border[1:], out_int32=True)
        least = torch.ones_like(decade) << decade
        level = (y * self.slope[decade] + least * (8 / 9)).int()
        level = torch.minimum(torch.maximum(level, least), 2 * least - 1).clamp_(max=most - 1)
        return torch.where(y > self.top, most, level) * (y > self.border[0])


@functools.cache
def _form(codes: torch.dtype) -> tuple[Form, Tensor]:
    """And the values of its levels, `[2^D]`."""
    decades = DECADES[codes]
    power = torch.tensor([10.0 ** (k + 1 - decades) for k in range(decades)])
    levels = torch.arange(1, (1 << decades) - 1)
    decade = torch.tensor([int(level).bit_length() - 1 for level in levels])
    part = (2 * levels + 1).float() / (2 << decade).float()
    values = torch.cat([torch.zeros(1), (part * 0.9 - 0.8) * power[decade], torch.ones(1)])
    exact = values.double()
    middles = ((exact[1:] + exact[:-1]) / 2).float()
    border = torch.stack([middles[(1 << k) - 1] for k in range(decades)])
    if codes == torch.uint8:
        border[0] = 0
    slope = torch.tensor([10.0 ** (decades - 1 - k) * 2**k / 0.9 for k in range(decades)])
    return Form(power, border, slope, middles[-1]), values


@functools.cache
def packed_form(codes: torch.dtype) -> Tensor:
    """The form of the map of these codes, for the kernel."""
    return _form(codes)[0].packed()


@functools.cache
def map_of(codes: torch.dtype, device: torch.device) -> Map:
    """The map of int8 or uint8 `codes`, for tensors on `device`. Its borders are where the kernel has them, to the last
    bit.
    """
    form, values = _form(codes)
    levels, one = torch.arange(1, len(values)), int(torch.ones(()).view(torch.int32))
    below, above = torch.zeros_like(levels), torch.full_like(levels, one)
    for _ in range(one.bit_length()):  # bits of positive floats are in their order
        middle = (below + above) // 2
        reached = form.levels(middle.int().view(torch.float32)) >= levels
        below, above = torch.where(reached, below, middle), torch.where(reached, middle, above)
    borders = below.int().view(torch.float32)
    if codes == torch.uint8:
        return Map(values.to(device), borders.to(device))
    under = torch.nextafter(-borders, torch.tensor(-torch.inf)).flip(0)  # a number on a border is nearer to 0
    both = torch.cat([values, torch.zeros(1), -values[1:].flip(0)])
    return Map(both.to(device), torch.cat([under, borders]).to(device))


class Quantised(NamedTuple):
    """A float32 tensor in 8 bits: `codes` of its shape, int8 for numbers with signs and uint8 for others, and `scales`,
    float32 `[blocks]`, of its elements in order.
    """

    codes: Tensor
    scales: Tensor

    def part(self, start: int, stop: int) -> Quantised:
        """The elements `start` .. `stop`, one-dimensional, in the same memory. `start` is a multiple of `BLOCK`."""
        return Quantised(self.codes.view(-1)[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)])

    def decoded(self) -> Tensor:
        """The numbers, float32."""
        flat = self.codes.view(-1)
        values = map_of(self.codes.dtype, flat.device).values
        found = _blocks(values[flat.int()]).mul_(self.scales[:, None])
        return found.view(-1)[: flat.numel()].view(self.codes.shape)

    def encode_(self, x: Tensor) -> Quantised:
        """Becomes `x`, float32 of the same shape."""
        if x.numel():
            blocks = _blocks(x.reshape(-1))
            torch.clamp(torch.linalg.vector_norm(blocks, torch.inf, dim=1), min=TINIEST, out=self.scales)
            borders = map_of(self.codes.dtype, x.device).borders
            codes = torch.bucketize(blocks / self.scales[:, None], borders, out_int32=True).view(-1)[: x.numel()]
            self.codes.view(-1).copy_(codes if self.codes.dtype == torch.uint8 else codes - len(borders) // 2)
        return self


def zeros(x: Tensor, *, signed: bool) -> Quantised:
    """Zeros in 8 bits, of the shape of `x` and on its device."""
    codes = torch.zeros(x.shape, dtype=torch.int8 if signed else torch.uint8, device=x.device)
    return Quantised(codes, torch.full((-(-x.numel() // BLOCK),), TINIEST, device=x.device))


def quantised(x: Tensor, *, signed: bool) -> Quantised:
    """`x` in 8 bits; numbers below 0 only if `signed`."""
    return zeros(x, signed=signed).encode_(x.detach().float())


def _blocks(flat: Tensor) -> Tensor:
    """`[blocks, BLOCK]`, the last one filled up with zeros."""
    padding = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(-1, BLOCK)


@runtime_checkable
class Packs(Protocol):
    """An optimizer that keeps slots in another form than that in which they are read."""

    def pack(self) -> None:
        """Brings them there."""
        ...


@runtime_checkable
class KeepsWhole(Protocol):
    """An optimizer that keeps slots of whole parameters, each on one rank (`Slot.whole`)."""

    def whole_shape(self, parameter: Parameter) -> Dims | None:
        """That of the whole parameter; None if its slots are on another rank."""
        ...


@runtime_checkable
class StoredElsewhere(Protocol):
    """What stands in the state for a tensor that is on disk."""

    def read(self) -> Tensor: ...


def named_slots(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """Every tensor of the state, by slot and parameter name. Empty before the first step."""
    return {
        f"{slot}/{name}": value.decoded() if isinstance(value, Quantised) else local(value)
        for name, parameter in parameters
        for slot, value in tree_map_only(StoredElsewhere, _read, dict(optimizer.state.get(parameter, {}))).items()
        if isinstance(value, Tensor | Quantised)
    }


def make_slots(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, Parameter]],
    saved: Mapping[str, torch.dtype],
    *,
    slots: Iterable[Slot],
) -> dict[str, Tensor]:
    """Empty tensors for the slots that were `saved` (name and dtype), put in the optimizer's state, to be filled.

    `slots` is what the optimizer declares. Those in 8 bits are filled in float32; then `pack_slots` is called. Raises
    `UsageError` for a saved slot that it does not have.
    """
    owners, declared, made = dict(parameters), {slot.name: slot for slot in slots}, {}
    device = None if _home(optimizer) is None else torch.device("cpu")
    for key, dtype in saved.items():
        slot, name = slot_and_parameter(key)
        if name not in owners:
            continue
        if slot not in declared:
            raise UsageError(
                f"the checkpoint holds optimizer state '{slot}', and this run's optimizer keeps "
                f"{', '.join(declared) or 'none'}: go on with the optimizer and the keys that wrote it"
            )
        parameter = owners[name]
        own = tuple(parameter.shape)
        shape = optimizer.whole_shape(parameter) if isinstance(optimizer, KeepsWhole) else own
        if shape is not None or declared[slot].like_parameter or declared[slot].with_parts:
            value = optimizer.state[parameter][slot] = _empty_slot(
                declared[slot], parameter, shape or own, dtype, device or parameter.device
            )
            made[key] = local(value)
    return made


def pack_slots(optimizer: torch.optim.Optimizer) -> None:
    """After everything was read: what the optimizer keeps in 8 bits is brought there."""
    if isinstance(optimizer, Packs):
        optimizer.pack()
    if (home := _home(optimizer)) is not None:
        home.put_away(optimizer.state)


def slot_and_parameter(key: str) -> tuple[str, str]:
    """The two parts of a name as `named_slots` makes it."""
    slot, _, name = key.partition("/")
    return slot, name


def local(tensor: Tensor) -> Tensor:
    """What of `tensor` lies on this rank, as a view."""
    # Asked for by name: importing DTensor costs every run's start what only a sharded one needs.
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def _empty_slot(slot: Slot, parameter: Parameter, shape: Dims, dtype: torch.dtype, device: torch.device) -> Tensor:
    if slot.like_parameter:
        return torch.zeros_like(parameter, dtype=dtype, device=device, memory_format=torch.contiguous_format)
    return torch.zeros(slot.shape(shape), dtype=dtype, device=parameter.device)


def _home(optimizer: torch.optim.Optimizer) -> StateHome | None:
    return optimizer.home if isinstance(optimizer, FusedOptimizer) else None


def _read(stored: StoredElsewhere) -> Tensor:
    return stored.read()
