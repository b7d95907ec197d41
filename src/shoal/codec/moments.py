"""Moments in 8 bits a number: dynamic blockwise quantisation, with a float32 scale for each block of `MOMENT_BLOCK`.

    scale s = max |x| over the block, `TINIEST` at least;    code = the level whose value is nearest to x / s

The values of D decades, level j in decade k, 2^k <= j < 2^(k+1):

    10^(k + 1 - D) (0.9 (j + 1/2) / 2^k - 0.8),    level 0 is 0, the last one 1

so that each decade has twice as many values as the one below it, in the middle of as many equal parts of it (dynamic
tree quantisation: Dettmers, arXiv:1511.04561; Dettmers et al., arXiv:2110.02861). Numbers with signs have 7 decades
and a sign; others, as the paper proposes, the sign's bit for twice as many values. Three things differ from the
paper:

  both signs end at 1, and the paper's at 0.993 and 1. So the largest number of a block is its scale exactly, and what
  was decoded is encoded as it was: a checkpoint may hold decoded numbers
  numbers without sign have an eighth decade, of one value, for the levels that this leaves
  of these, only 0 becomes 0. A second moment that became 0 beside a first that did not would make a step of m / eps
  (arXiv:2309.01507 calls it the zero-point problem)

`TINIEST` keeps all products of scales and values normal float32 numbers. Blocks whose largest number is below it have
it as their scale. Blocks of 256 cost 1.6 % in scales, and are what ZeRO does not cut; the paper's of 2,048 cost 0.2
%, and an outlier in one spoils eight times as many numbers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codec.config import MOMENT_BLOCK
from shoal.codec.kernels import Moment, kernels_for

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
        rows = self.border.new_zeros(3, _FORM_DECADES)
        rows[:, : len(self.power)] = torch.stack([self.power, self.border, self.slope])
        return torch.cat([rows.view(-1), self.top.view(1), self.top.new_tensor([TINIEST])])

    def levels(self, y: Tensor) -> Tensor:
        """The level of each number, int32."""
        most = (1 << len(self.power)) - 1
        decade = torch.bucketize(y, self.border[1:], out_int32=True)
        least = torch.ones_like(decade) << decade
        level = (y * self.slope[decade] + least * (8 / 9)).int()
        level = torch.minimum(torch.maximum(level, least), 2 * least - 1).clamp_(max=most - 1)
        return torch.where(y > self.top, most, level) * (y > self.border[0])


def _float32(*numbers: float) -> Tensor:
    """Float32 on the CPU, whatever defaults a script has set: caches keep it, and the kernel reads it."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


@functools.cache
def _form(codes: torch.dtype) -> tuple[Form, Tensor]:
    """And the values of its levels, `[2^D]`."""
    decades = DECADES[codes]
    power = _float32(*(10.0 ** (k + 1 - decades) for k in range(decades)))
    levels = torch.arange(1, (1 << decades) - 1, device="cpu")
    decade = torch.tensor([int(level).bit_length() - 1 for level in levels], device="cpu")
    part = (2 * levels + 1).float() / (2 << decade).float()
    values = torch.cat([_float32(0), (part * 0.9 - 0.8) * power[decade], _float32(1)])
    exact = values.double()
    middles = ((exact[1:] + exact[:-1]) / 2).float()
    border = torch.stack([middles[(1 << k) - 1] for k in range(decades)])
    if codes == torch.uint8:
        border[0] = 0
    slope = _float32(*(10.0 ** (decades - 1 - k) * 2**k / 0.9 for k in range(decades)))
    return Form(power, border, slope, middles[-1]), values


@functools.cache
def _packed_form(codes: torch.dtype) -> Tensor:
    """The form of the map of these codes, for the kernel."""
    return _form(codes)[0].packed()


@functools.cache
def map_of(codes: torch.dtype, device: torch.device) -> Map:
    """The map of int8 or uint8 `codes`, for tensors on `device`. Its borders are where the kernel has them, to the last
    bit, for finite numbers.
    """
    form, values = _form(codes)
    levels, one = torch.arange(1, len(values), device="cpu"), int(_float32(1).view(torch.int32))
    below, above = torch.zeros_like(levels), torch.full_like(levels, one)
    for _ in range(one.bit_length()):  # bits of positive floats are in their order
        middle = (below + above) // 2
        reached = form.levels(middle.int().view(torch.float32)) >= levels
        below, above = torch.where(reached, below, middle), torch.where(reached, middle, above)
    borders = below.int().view(torch.float32)
    if codes == torch.uint8:
        return Map(values.to(device), borders.to(device))
    under = torch.nextafter(-borders, _float32(-torch.inf)).flip(0)  # a number on a border is nearer to 0
    both = torch.cat([values, _float32(0), -values[1:].flip(0)])
    return Map(both.to(device), torch.cat([under, borders]).to(device))


class Quantised(NamedTuple):
    """A float32 tensor in 8 bits: `codes` of its shape, int8 for numbers with signs and uint8 for others, and `scales`,
    float32 `[blocks]`, of its elements in order.
    """

    codes: Tensor
    scales: Tensor

    def part(self, start: int, stop: int) -> Quantised:
        """Elements `start` .. `stop`, one-dimensional, in the same memory; `start` is a multiple of `MOMENT_BLOCK`."""
        return Quantised(self.codes.view(-1)[start:stop], self.scales[start // MOMENT_BLOCK : -(-stop // MOMENT_BLOCK)])

    def decoded(self) -> Tensor:
        """The numbers, float32."""
        kernels = kernels_for(self.scales) if self.codes.is_contiguous() else None
        if kernels is None:
            return self.decoded_in_torch()
        out = torch.empty_like(self.codes, dtype=torch.float32)
        kernels.decode_moment(self.kernel_form, out, block=MOMENT_BLOCK)
        return out

    def encode_(self, x: Tensor) -> Quantised:
        """Becomes `x`, float32 of the same shape."""
        kernels = kernels_for(x, self.scales) if self.codes.is_contiguous() else None
        if kernels is None:
            return self.encode_in_torch_(x)
        kernels.encode_moment(x.contiguous(), self.kernel_form, block=MOMENT_BLOCK)
        return self

    @property
    def kernel_form(self) -> Moment:
        """As the kernels take it."""
        return Moment(self.codes, self.scales, _packed_form(self.codes.dtype))

    def decoded_in_torch(self) -> Tensor:
        """The same as `decoded`, by torch's operators."""
        flat = self.codes.view(-1)
        values = map_of(self.codes.dtype, flat.device).values
        found = _blocks(values[flat.int()]).mul_(self.scales[:, None])
        return found.view(-1)[: flat.numel()].view(self.codes.shape)

    def encode_in_torch_(self, x: Tensor) -> Quantised:
        """The same as `encode_`, by torch's operators."""
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
    blocks = (-(-x.numel() // MOMENT_BLOCK),)
    return Quantised(codes, torch.full(blocks, TINIEST, dtype=torch.float32, device=x.device))


def quantised(x: Tensor, *, signed: bool) -> Quantised:
    """`x` in 8 bits; numbers below 0 only if `signed`."""
    return zeros(x, signed=signed).encode_(x.detach().float())


def _blocks(flat: Tensor) -> Tensor:
    """`[blocks, MOMENT_BLOCK]`, the last one filled up with zeros."""
    padding = -flat.numel() % MOMENT_BLOCK
    return (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(-1, MOMENT_BLOCK)
