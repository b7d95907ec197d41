"""What arrays become on the wire, in NumPy: casts, blocks of integers, the largest numbers. The formats, and the bits,
are those of `shoal.codec`, which is their oracle in the tests.

    Cast("bfloat16")      2 bytes a number; needs the package ml_dtypes
    Cast("float16")       2 bytes a number and a scale for each block: s = max |x_i| / 65504
    Int8(block=1024)      1 byte a number and a scale for each block: s = max |x_i| / 127, q_i = round(x_i / s)
    TopK(share)           the largest numbers by magnitude, 8 bytes each; wrap it in `ErrorFeedback`

`ErrorFeedback(codec)` adds what the last encoding lost to the next vector (Karimireddy et al., arXiv:1901.09847); it
belongs to one array of one length.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

from shoal.errors import MissingExtra, UsageError
from shoal.wire.arrays import Array


class Codec(Protocol):
    """A vector `[numel]` to bytes and back. The bytes' number depends on `numel` alone."""

    def encode(self, x: Array) -> Array: ...
    def decode(self, payload: Array, numel: int, dtype: np.dtype[Any]) -> Array: ...


class Cast:
    """Every number in 16 bits, rounded to nearest. `dtype`: "float16", in blocks that share a scale, or "bfloat16"."""

    def __init__(self, dtype: str = "float16", *, block: int = 1024) -> None:
        if dtype not in ("float16", "bfloat16") or block < 1:
            raise UsageError(
                f"a cast to {dtype!r} in blocks of {block}: it is float16 or bfloat16, in blocks of 1 or more"
            )
        self._scaled, self._block = dtype == "float16", block
        self._dtype = np.dtype(np.float16) if self._scaled else _bfloat16()

    def encode(self, x: Array) -> Array:
        if not self._scaled:
            return x.astype(self._dtype).view(np.uint8)
        return _joined(*_scaled(x, self._block, 65504.0, self._dtype))

    def decode(self, payload: Array, numel: int, dtype: np.dtype[Any]) -> Array:
        if not self._scaled:
            return payload.view(self._dtype).astype(dtype)
        return _times_scale(payload, numel, self._block, self._dtype, dtype)


class Int8:
    """Every number in 8 bits, to nearest; a block shares a scale."""

    def __init__(self, *, block: int = 1024) -> None:
        if block < 1:
            raise UsageError(f"blocks of {block} numbers: a block has 1 or more")
        self._block = block

    def encode(self, x: Array) -> Array:
        scales, scaled = _scaled(x, self._block, 127.0, np.dtype(np.float32))
        with np.errstate(invalid="ignore"):
            return _joined(scales, np.rint(scaled).astype(np.int8))

    def decode(self, payload: Array, numel: int, dtype: np.dtype[Any]) -> Array:
        return _times_scale(payload, numel, self._block, np.dtype(np.int8), dtype)


class TopK:
    """The `share` of numbers that are largest by magnitude; ties go to the lower index. Others decode to zero."""

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"the largest {share:g} of all numbers: the share is above 0 and at most 1")
        self._share = share

    def encode(self, x: Array) -> Array:
        count = self._count(x.size)
        kept = _largest(np.abs(x), count).astype(np.int32)
        return _joined(kept, x[kept].astype(np.float32))

    def decode(self, payload: Array, numel: int, dtype: np.dtype[Any]) -> Array:
        count = self._count(numel)
        kept, values = payload[: 4 * count].view(np.int32), payload[4 * count :].view(np.float32)
        x = np.zeros(numel, dtype)
        x[kept] = values
        return x

    def _count(self, numel: int) -> int:
        return min(numel, max(1, round(self._share * numel)))


def _largest(sizes: Array, count: int) -> Array:
    """The places of the `count` largest, in order; of equal ones the first. What is no number counts as the least."""
    if np.isnan(sizes.max(initial=0)):
        return np.sort(np.argsort(-sizes, kind="stable")[:count])
    if not sizes.size:
        return np.zeros(0, np.int64)
    least = np.partition(sizes, sizes.size - count)[sizes.size - count]
    above = np.flatnonzero(sizes > least)
    return np.sort(np.concatenate([above, np.flatnonzero(sizes == least)[: count - above.size]]))


class ErrorFeedback:
    """`codec` for one array: what an encoding loses is in the next. `lost` `[numel]` is its state, None before."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.lost = codec, None

    lost: Array | None

    def encode(self, x: Array) -> Array:
        if self.lost is not None and self.lost.shape != x.shape:
            raise UsageError(f"error feedback of {self.lost.size} numbers, given {x.size}: use one for each array")
        whole = x if self.lost is None else x + self.lost
        payload = self.codec.encode(whole)
        self.lost = whole - self.codec.decode(payload, x.size, x.dtype)
        return payload

    def decode(self, payload: Array, numel: int, dtype: np.dtype[Any]) -> Array:
        return self.codec.decode(payload, numel, dtype)


def _scaled(x: Array, block: int, most: float, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Scales float32 `[blocks]`, and x / scale `[numel]` in `dtype`."""
    rows = np.zeros((-(-x.size // block), block), np.float32)
    rows.reshape(-1)[: x.size] = x
    scales = np.abs(rows).max(axis=1) / np.float32(most) if x.size else np.zeros(0, np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(scales > 0, scales, np.where(scales == 0, np.float32(1), scales))
        scaled = np.clip(rows / inverse[:, None], -most, most)
    return scales.astype(np.float32), scaled.reshape(-1)[: x.size].astype(dtype)


def _joined(*fields: Array) -> Array:
    return np.concatenate([field.view(np.uint8) for field in fields])


def _times_scale(payload: Array, numel: int, block: int, held: np.dtype[Any], dtype: np.dtype[Any]) -> Array:
    blocks = -(-numel // block)
    scales, numbers = payload[: 4 * blocks].view(np.float32), payload[4 * blocks :].view(held)
    return (numbers.astype(dtype) * np.repeat(scales, block)[:numel]).astype(dtype, copy=False)


def _bfloat16() -> np.dtype[Any]:
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise MissingExtra("ml_dtypes", extra="jax", purpose="a cast of NumPy arrays to bfloat16") from None
