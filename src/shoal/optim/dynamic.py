"""Dynamic blockwise quantisation: a vector in 8 bits a number, with one float32 scale for each block of `BLOCK`.

    scale s = max |x| over the block, `TINIEST` at least;    code = the level whose value is nearest to x / s

The values of D decades, level j in decade k, 2^k <= j < 2^(k+1):

    10^(k + 1 - D) (0.9 (j + 1/2) / 2^k - 0.8),    level 0 is 0, the last one 1

so that each decade has twice as many values as the one below it, in the middle of as many equal parts of it (dynamic tree
quantisation: Dettmers, arXiv:1511.04561; Dettmers et al., arXiv:2110.02861). Numbers with signs have 7 decades and a
sign; others, as the paper proposes, the sign's bit for twice as many values. Three things differ from the paper:

    both signs end at 1, and the paper's at 0.993 and 1. So the largest number of a block is its scale exactly, and what
    was decoded is encoded as it was: a checkpoint may hold decoded numbers
    numbers without sign have an eighth decade, of one value, for the levels that this leaves
    of these, only 0 becomes 0. A second moment that became 0 beside a first that did not would make a step of m / eps
    (arXiv:2309.01507 calls it the zero-point problem)

`TINIEST` keeps all products of scales and values normal float32 numbers. Blocks whose largest number is below it have it
as their scale. Blocks of 256 cost 1.6 % in scales, and are what ZeRO does not cut; the paper's of 2,048 cost 0.2 %, and an
outlier in one spoils eight times as many numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.optim.config import BLOCK

DECADES = {torch.int8: 7, torch.uint8: 8}
"""By the dtype of the codes: numbers with signs, and numbers that are at least 0."""
TINIEST = 2.0**-101
"""Its product with the least value, 5.5e-8 > 2^-25, is above the least normal number, 2^-126."""
_FORM_DECADES = 8


@dataclass(frozen=True)
class Map:
    """The values of a map, and what finds the level of a number y from 0 to 1. Tensors are float32.

    `values` `[256]`: by code, negative ones from the end. y is in decade k if it is above `border[k]` and not above the
    next; below `border[0]` it is 0, and above `top` 1. Its level is then the whole part of y `slope[k]` + 2^k 8/9, if
    that is in the decade. `power` `[D]` are the decades' powers of ten.
    """

    values: Tensor
    power: Tensor
    border: Tensor
    slope: Tensor
    top: float

    @functools.cached_property
    def form(self) -> Tensor:
        """Float32 `[26]` on the CPU, for the kernel."""
        rows = torch.zeros(3, _FORM_DECADES)
        for row, given in zip(rows, (self.power, self.border, self.slope), strict=True):
            row[: len(given)] = given
        return torch.cat([rows.view(-1), torch.tensor([self.top, TINIEST])])


@functools.cache
def map_of(codes: torch.dtype, device: torch.device) -> Map:
    """The map of int8 or uint8 `codes`, for tensors on `device`."""
    decades, signed = DECADES[codes], codes == torch.int8
    most = (1 << decades) - 1
    power = torch.tensor([10.0 ** (k + 1 - decades) for k in range(decades)])
    levels = torch.arange(1, most, dtype=torch.int64)
    decade = torch.tensor([int(j).bit_length() - 1 for j in levels])
    part = (2 * levels + 1).float() / (2.0 ** (decade + 1)).float()
    above = torch.cat([torch.zeros(1), (part * 0.9 - 0.8) * power[decade], torch.ones(1)])
    values = torch.cat([above, torch.zeros(1), -above[1:].flip(0)]) if signed else above
    exact = above.double()
    border = [(exact[(1 << k) - 1] + exact[1 << k]) / 2 for k in range(decades)]
    if not signed:
        border[0] = torch.zeros((), dtype=torch.float64)
    slope = torch.tensor([10.0 ** (decades - 1 - k) * 2**k / 0.9 for k in range(decades)])
    top = float(((exact[most - 1] + exact[most]) / 2).float())
    return Map(*(tensor.to(device) for tensor in (values, power, torch.stack(border).float(), slope)), top)


class Quantised(NamedTuple):
    """A float32 tensor in 8 bits: `codes` of its shape, int8 for numbers with signs and uint8 for others, and `scales`,
    float32 `[blocks]`, of its elements in order.
    """

    codes: Tensor
    scales: Tensor

    @property
    def map(self) -> Map:
        """What the codes stand for."""
        return map_of(self.codes.dtype, self.codes.device)

    def part(self, start: int, stop: int) -> Quantised:
        """The elements `start` .. `stop`, one-dimensional, in the same memory. `start` is a multiple of `BLOCK`."""
        return Quantised(self.codes.view(-1)[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)])

    def decoded(self) -> Tensor:
        """The numbers, float32."""
        flat = self.codes.view(-1)
        found = _blocks(self.map.values[flat.int()]) * self.scales[:, None]
        return found.view(-1)[: flat.numel()].view(self.codes.shape)

    def encode_(self, x: Tensor) -> Quantised:
        """Becomes `x`, float32 of the same shape."""
        if x.numel():
            blocks = _blocks(x.reshape(-1))
            torch.clamp(blocks.abs().amax(dim=1), min=TINIEST, out=self.scales)
            levels = self._levels(blocks.abs() / self.scales[:, None])
            codes = torch.where(blocks < 0, -levels, levels) if self.codes.dtype == torch.int8 else levels
            self.codes.view(-1).copy_(codes.view(-1)[: x.numel()])
        return self

    def _levels(self, y: Tensor) -> Tensor:
        m, most = self.map, (1 << DECADES[self.codes.dtype]) - 1
        decade = torch.bucketize(y, m.border[1:], out_int32=True)
        least = torch.ones_like(decade) << decade
        level = (y * m.slope[decade] + least * (8 / 9)).int()
        level = torch.minimum(torch.maximum(level, least), 2 * least - 1).clamp_(max=most - 1)
        return torch.where(y > m.top, most, level) * (y > m.border[0])


def quantised(x: Tensor, *, signed: bool) -> Quantised:
    """`x` in 8 bits; numbers below 0 only if `signed`."""
    codes = torch.empty(x.shape, dtype=torch.int8 if signed else torch.uint8, device=x.device)
    scales = torch.empty(-(-x.numel() // BLOCK), dtype=torch.float32, device=x.device)
    return Quantised(codes, scales).encode_(x.detach().float())


def _blocks(flat: Tensor) -> Tensor:
    """`[blocks, BLOCK]`, the last one filled up with zeros."""
    padding = -flat.numel() % BLOCK
    return (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).view(-1, BLOCK)
