"""Few bits a number: quantisation by blocks, and casts (`Cast`).

Every number of a block becomes one of few whole numbers, which share a scale.

    s = scale of the block       largest: max |x_i| / L      norm: |x|_2 / L      mean: sum |x_i| / d
    q_i = round(x_i / s)         nearest: ties to even       stochastic: floor(x_i / s + u), u uniform in (0, 1)
                                 sign: 1 or -1, and no other
    y_i = s q_i,                 |q_i| <= L

Stochastic rounding makes E[y] = x. One large number spoils the resolution of its own block alone. On the wire: s in
float32, and q in 8 bits (L = 127), 4 bits (L = 7), a fifth of a byte (-1, 0 and 1) or 1 bit (signs). What is not
finite takes its block's scale with it, so that its block decodes to NaN.

`Quantised` is the codec; the codecs that are one choice of scale, rounding and L each say where it comes from:
`Blockwise`, `QSGD`, `TernGrad` and `Sign`. float32 on a CPU is coded in C (`kernels`), all else in torch, which
Inductor compiles on a GPU with Triton where nothing is drawn.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from shoal.codec.codec import Codec, Field, Payload, block_count, in_blocks, lengths_of, per_scale, times_scale
from shoal.codec.config import BlockwiseConfig, CastConfig, QSGDConfig, SignConfig, TernGradConfig
from shoal.codec.kernels import compiled, compiles_for, kernels_for
from shoal.maths.counter import uniform

# Small integers in bytes: m digits of base b in one, the first the least significant.
#
# base 2    8 in a byte      signs
# base 3    5 in a byte      -1, 0 and 1, at 1.6 bits each (3^5 = 243)
# base 16   2 in a byte


def per_byte(base: int) -> int:
    """Digits of this base (2 to 255) in a byte."""
    return int(math.log(256, base) + 1e-9)


def packed_bytes(numel: int, base: int) -> int:
    """Bytes of `numel` digits."""
    return -(-numel // per_byte(base))


def pack_digits(digits: Tensor, base: int) -> Tensor:
    """uint8 `[packed_bytes]` from uint8 `[numel]`, every one below `base`."""
    count = per_byte(base)
    rest = -digits.numel() % count
    if rest:
        digits = torch.nn.functional.pad(digits, (0, rest))
    columns = digits.view(-1, count)
    packed = columns[:, -1].clone()
    for number in range(count - 2, -1, -1):
        packed.mul_(base).add_(columns[:, number])
    return packed


def unpack_digits(packed: Tensor, numel: int, base: int) -> Tensor:
    """uint8 `[numel]`, the inverse of `pack_digits`."""
    count = per_byte(base)
    columns = torch.empty(packed.numel(), count, dtype=torch.uint8, device=packed.device)
    rest = packed
    for number in range(count):
        columns[:, number] = rest % base
        rest = rest // base
    return columns.view(-1)[:numel]


Scale = Literal["largest", "norm", "mean"]
Rounding = Literal["nearest", "stochastic", "sign"]


class Quantised(Codec):
    """Blocks of `block` numbers, each a whole number of -`levels` to `levels` (127, 7 or 1) times its block's scale."""

    shows_nonfinite = True

    def __init__(self, *, block: int, levels: int, scale: Scale, rounding: Rounding) -> None:
        self._block, self._levels, self._scale, self._rounding = block, levels, scale, rounding
        self._base = 2 if rounding == "sign" else {127: 256, 7: 16, 1: 3}[levels]
        self.unbiased = rounding == "stochastic"

    def fields(self, numel: int) -> tuple[Field, ...]:
        dtype = torch.int8 if self._base == 256 else torch.uint8
        digits = numel if self._base == 256 else packed_bytes(numel, self._base)
        return Field(torch.float32, block_count(numel, self._block)), Field(dtype, digits)

    def _encode(self, x: Tensor, key: int) -> Payload:
        kernels = kernels_for(x)
        if kernels is None:
            drawn = self._rounding == "stochastic"  # another key, and so another program, in each call
            encode = compiled(Quantised.encode_in_torch) if compiles_for(x) and not drawn else Quantised.encode_in_torch
            return encode(self, x, key)
        scales, digits = (x.new_empty(field.numel, dtype=field.dtype) for field in self.fields(x.numel()))
        kernels.encode(
            x, scales, digits, block=self._block, scale=self._scale, rounding=self._rounding, levels=self._levels,
            base=self._base, key=key,
        )  # fmt: skip
        return scales, digits

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        scales, digits = payload
        result = torch.empty(numel, dtype=dtype, device=scales.device)
        kernels = kernels_for(result)
        if kernels is None:
            decode = compiled(Quantised.decode_in_torch) if compiles_for(result) else Quantised.decode_in_torch
            return decode(self, payload, numel, dtype)
        kernels.decode(scales, digits, result, block=self._block, levels=self._levels, base=self._base)
        return result

    def encode_in_torch(self, x: Tensor, key: int) -> Payload:
        """The payload of `x` `[numel]` float32 or float64 on any device."""
        rows = in_blocks(x, self._block)
        scales = self._scales(rows, x.numel()).float()
        if self._rounding == "sign":
            return scales, pack_digits((x >= 0).view(torch.uint8), 2)
        scaled = per_scale(rows, scales)
        rounded = round_at_random(scaled, key) if self._rounding == "stochastic" else scaled.round_()
        limited = rounded.nan_to_num_(0.0).clamp_(-self._levels, self._levels).view(-1)[: x.numel()].to(torch.int8)
        return scales, limited if self._base == 256 else pack_digits((limited + self._levels).byte(), self._base)

    def decode_in_torch(self, payload: Payload, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector `[numel]` on any device."""
        scales, digits = payload
        if self._base != 256:
            digits = unpack_digits(digits, numel, self._base).to(torch.int8)
            digits = digits.mul_(2).sub_(1) if self._base == 2 else digits.sub_(self._levels)
        return times_scale(in_blocks(digits, self._block), scales, numel, dtype)

    def _scales(self, rows: Tensor, numel: int) -> Tensor:
        """`[blocks]` of `rows` `[blocks, block]`."""
        if self._scale == "largest":
            return rows.abs().amax(1) / self._levels
        if self._scale == "norm":
            return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / self._levels
        sums = rows.abs().sum(1, dtype=torch.float64)
        return sums / lengths_of(numel, self._block, sums)


def round_at_random(x: Tensor, key: int) -> Tensor:
    """Whole numbers `[...]` in the dtype of `x`: floor(x + u), u uniform in (0, 1), so that the expectation is `x`."""
    places = torch.arange(x.numel(), dtype=torch.int64, device=x.device).view(x.shape)
    return (x + uniform(key, places, dtype=x.dtype)).floor_()


# Blockwise integers: a block shares one scale, and every number becomes an integer of 8 or 4 bits.
#
#     s = max |x_i| / L,   q_i = round(x_i / s),   y_i = s q_i,      L = 127 or 7
#
# (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 2.1, with linear levels.)
# To nearest: |x - y| <= s / 2. Stochastic: up with the probability of the fraction that is cut off, so that E[y] = x.


class Blockwise(Quantised):
    """`BlockwiseConfig`, on the wire."""

    def __init__(self, config: BlockwiseConfig) -> None:
        super().__init__(block=config.block, levels=config.levels, scale="largest", rounding=config.rounding)


# QSGD: a block's 2-norm, and for every number a random one of the two levels beside it.
#
#     y_i = |x|_2 sign(x_i) l_i / L,   l_i in {0 .. L} rounded at random from L |x_i| / |x|_2
#
# (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", arXiv:1610.02132,
# equation 3.) Unbiased. In a block of d numbers E|x - y|^2 <= min(d / L^2, sqrt(d) / L) |x|^2 (lemma 3.1). Levels are
# sent in 8 or 4 bits, without the paper's Elias code, so that the bytes are known beforehand.


class QSGD(Quantised):
    """`QSGDConfig`, on the wire."""

    def __init__(self, config: QSGDConfig) -> None:
        levels = (1 << (config.bits - 1)) - 1
        super().__init__(block=config.block, levels=levels, scale="norm", rounding="stochastic")


# One bit: the sign of every number, and one scale a block.
#
#     y_i = s sign(x_i),   s = mean |x_i| over the block
#
# (Seide et al., Interspeech 2014; the scale of Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847,
# algorithm 1.) The scale makes y the closest vector of the form c sign(x), and leaves |x - y|^2 = |x|^2 - |x|_1^2 / d
# in a block of d numbers. Biased: it needs error feedback. Zero counts as positive.


class Sign(Quantised):
    """`SignConfig`, on the wire."""

    def __init__(self, config: SignConfig) -> None:
        super().__init__(block=config.block, levels=1, scale="mean", rounding="sign")


# TernGrad: -1, 0 or 1 for every number, and one scale a block; 1.6 bits a number.
#
#     y_i = s sign(x_i) b_i,   b_i = 1 with probability |x_i| / s,   s = max |x_i| over the block
#
# (Wen et al., "TernGrad: Ternary Gradients to Reduce Communication", arXiv:1705.07878, equations 1 to 3.) Unbiased. The
# paper first clips to 2.5 standard deviations, which is not unbiased; small blocks keep s near the numbers instead.


class TernGrad(Quantised):
    """`TernGradConfig`, on the wire."""

    def __init__(self, config: TernGradConfig) -> None:
        super().__init__(block=config.block, levels=1, scale="largest", rounding="stochastic")


# Cast: every number in fewer bits, rounded to nearest.
#
# bfloat16 has the range of float32 and is sent as it is. float16 and float8 (Micikevicius et al., "FP8 Formats for Deep
# Learning", arXiv:2209.05433) have little range, so a block of numbers shares a scale that takes its largest to the
# format's largest:
#
#     s = max |x_i| / largest,   sent: s in float32, round(x_i / s)
#
# Not linear: sums of 16-bit numbers would round again at every hop. Decoded, summed in float32 and encoded once more,
# the same bytes carry one rounding more, however many ranks there are.


_SCALED = {"float16": torch.float16, "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


class Cast(Codec):
    """`CastConfig`, on the wire."""

    shows_nonfinite = True

    def __init__(self, config: CastConfig) -> None:
        self._block = config.block
        self._scaled = _SCALED.get(config.dtype)

    def fields(self, numel: int) -> tuple[Field, ...]:
        if self._scaled is None:
            return (Field(torch.bfloat16, numel),)
        scales, numbers = Field(torch.float32, block_count(numel, self._block)), Field(self._scaled, numel)
        return scales, numbers

    def _encode(self, x: Tensor, key: int) -> Payload:
        kernels = kernels_for(x)
        if kernels is None:
            return self.encode_in_torch(x)
        if self._scaled is None:
            narrow = torch.empty_like(x, dtype=torch.bfloat16)
            kernels.to_bfloat16(x, narrow)
            return (narrow,)
        scales, numbers = (x.new_empty(field.numel, dtype=field.dtype) for field in self.fields(x.numel()))
        kernels.narrow(x, scales, numbers, block=self._block)
        return scales, numbers

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        result = torch.empty(numel, dtype=dtype, device=payload[0].device)
        kernels = kernels_for(result)
        if kernels is None:
            return self.decode_in_torch(payload, numel, dtype)
        if self._scaled is None:
            kernels.from_bfloat16(payload[0], result)
        else:
            scales, numbers = payload
            kernels.widen(scales, numbers, result, block=self._block)
        return result

    def encode_in_torch(self, x: Tensor) -> Payload:
        """The payload of `x` `[numel]` float32 or float64 on any device."""
        if self._scaled is None:
            return (x.to(torch.bfloat16),)
        rows, largest = in_blocks(x, self._block), torch.finfo(self._scaled).max
        scales = (rows.abs().amax(1) / largest).float()
        scaled = per_scale(rows, scales).clamp_(-largest, largest)
        return scales, scaled.to(self._scaled).view(-1)[: x.numel()]

    def decode_in_torch(self, payload: Payload, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector `[numel]` on any device."""
        if self._scaled is None:
            return payload[0].to(dtype)
        scales, numbers = payload
        return times_scale(in_blocks(numbers.to(dtype), self._block), scales, numel, dtype)
