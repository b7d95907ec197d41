"""`Codec`: what a vector becomes on the wire, and back. Pure functions of tensors; a codec knows no other rank.

    y = decode(encode(x))        what the others get
    e = x - y                    what they do not get; error feedback adds it to the next vector

A codec says three things that the exchange of a sum asks:

    linear        payloads may be added on the way, in the rounds of `summing`
    unbiased      E[decode(encode(x))] = x over the random numbers of the codec; without error feedback this is what
                  keeps the mean of many steps right
    wire_bytes    bytes of one payload, exactly; they follow from the length alone, so that nobody asks for sizes

What is not finite is never hidden: a vector with NaN or infinity in it decodes to numbers of which at least one is not
finite. So every rank sees that the step has to be skipped. Codecs that would lose sight of it get NaN everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.codec.costs import ALIGNMENT_BYTES
from shoal.codec.kernels import kernels_for

Payload = tuple[Tensor, ...]
"""What is sent: one-dimensional tensors, as `Codec.fields` describes them."""

MAX_NUMEL = 1 << 31
"""Indices are counted in int32."""


class Field(NamedTuple):
    """One tensor of a payload."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.dtype.itemsize * self.numel


class TensorPlace(NamedTuple):
    """Where the tensor `name` lies in a flat buffer: from `start` on, in `shape`."""

    name: str
    start: int
    shape: tuple[int, ...]


class Codec(ABC):
    """One way to encode vectors."""

    linear: bool = False
    unbiased: bool = False
    shows_nonfinite: bool = False
    """Whether what is not finite shows in whatever `_encode` makes of it, so that no pass over the vector looks for it.
    """

    @abstractmethod
    def fields(self, numel: int) -> tuple[Field, ...]:
        """The tensors of the payload of a vector of `numel`, the largest element size first."""

    @abstractmethod
    def _encode(self, x: Tensor, key: int) -> Payload:
        """`x` `[numel]` float32 or float64, contiguous; finite or NaN everywhere, unless it `shows_nonfinite`."""

    @abstractmethod
    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        """The vector `[numel]`, in `dtype`."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What a codec that is bound to a buffer learns from step to step, by names of its own; to be saved."""
        return {}

    def bound(self, places: Sequence[TensorPlace], *, key: int, rank: int, ranks: int) -> Codec:
        """The codec for one buffer in which tensors lie at `places`, on rank `rank` of `ranks` that sum it; most do not
        care. `key`: of random numbers. Only a `linear` codec may read numbers by their places: of another, parts of
        the buffer are encoded by themselves where that sends less (`comm.exchanges.coded_sum`).
        """
        return self

    def begin(self, number: int) -> None:  # noqa: B027, most codecs do nothing
        """Called before sum `number` of a bound codec, from 1 on, the same on all ranks. Most do not care."""

    def summing(self, x: Tensor, *, key: int) -> Generator[Payload, None, tuple[Tensor, Tensor]]:
        """The sum of `x` over ranks, by a linear codec: yields payloads that the caller sums over the ranks in place.

        Returns, in the dtype of `x`, what this rank has sent, and the sum. Most need one payload.
        """
        payload = self.encode(x, key=key)
        own = tuple(part.clone() for part in payload)
        yield payload
        sent, total = (self.decode(part, x.numel(), key=key, dtype=x.dtype) for part in (own, payload))
        return sent, total

    def summing_into(self, x: Tensor, total: Tensor, *, key: int, residual: bool) -> Generator[Payload, None, None]:
        """The same sum, written into `total`, as long and of the dtype of `x`. With `residual`, `x` becomes what this
        rank has not sent of it.

        For codecs that can write both without another vector as long.
        """
        sent, found = yield from self.summing(x, key=key)
        if residual:
            x.sub_(sent)
        total.copy_(found)

    def wire_bytes(self, numel: int) -> int:
        """Bytes of the packed payload of a vector of `numel`."""
        used = sum(field.nbytes for field in self.fields(numel))
        return -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def encode(self, x: Tensor, *, key: int = 0) -> Payload:
        """The payload of a floating-point tensor of any shape, row by row.

        `key` is that of the random numbers, if the codec draws any. For a linear codec it must be the same on all ranks
        whose payloads are added; for the others it should differ from rank to rank, so that errors average out. Raises
        `ValueError` for other dtypes, and for vectors of 2^31 elements or more.
        """
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"a codec was given {x.dtype}: it encodes real floating-point tensors; convert it")
        if x.numel() >= MAX_NUMEL:
            raise ValueError(f"a codec was given {x.numel()} numbers: the most are 2^31 - 1; use smaller buckets")
        flat = x.detach().reshape(-1).contiguous()
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        return self._encode(flat if self.shows_nonfinite else all_or_nothing(flat), key)

    def decode(self, payload: Payload, numel: int, *, key: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The vector `[numel]` that `payload` stands for, in float32 or float64. `key` as for `encode`."""
        return self._decode(payload, numel, key, dtype)


def pack(codec: Codec, payload: Payload) -> Tensor:
    """The payload as bytes: uint8 `[wire_bytes]`; the last few may be padding."""
    parts = [part.view(torch.uint8) for part in payload if part.numel()]
    used = sum(part.numel() for part in parts)
    padding = -used % ALIGNMENT_BYTES
    if padding:
        parts.append(torch.zeros(padding, dtype=torch.uint8, device=parts[0].device))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device=payload[0].device)


def unpack(codec: Codec, packed: Tensor, numel: int) -> Payload:
    """The payload of a vector of `numel` that `pack` made uint8 `[wire_bytes]` of; views of it where that can be."""
    parts, at = [], 0
    for field in codec.fields(numel):
        parts.append(packed[at : at + field.nbytes].view(field.dtype))
        at += field.nbytes
    return tuple(parts)


def all_or_nothing(x: Tensor) -> Tensor:
    """`x` if it is finite, else NaN everywhere. No device waits for the answer; on a CPU looking is the cheaper."""
    if not x.numel():
        return x
    kernels = kernels_for(x)
    if kernels is not None:
        return x if math.isfinite(kernels.largest(x)) else torch.full_like(x, torch.nan)
    largest = torch.linalg.vector_norm(x, ord=torch.inf)  # NaN and infinity both come through
    if x.device.type == "cpu":
        return x if bool(torch.isfinite(largest)) else torch.full_like(x, torch.nan)
    return torch.where(torch.isfinite(largest), x, torch.nan)


# Blocks: numbers that share a scale. One large number then spoils the resolution of its own block alone.


def block_count(numel: int, block: int) -> int:
    """Blocks of at most `block` elements that hold `numel`."""
    return -(-numel // block)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """`x` `[numel]` as `[blocks, block]`, filled up with zeros; a view where nothing has to be filled."""
    rest = -x.numel() % block
    return (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, block)


def lengths_of(numel: int, block: int, like: Tensor) -> Tensor:
    """Elements in each block: `[blocks]` in the dtype of `like`, all `block` but perhaps the last."""
    count = block_count(numel, block)
    lengths = torch.full((count,), float(block), dtype=like.dtype, device=like.device)
    if count:
        lengths[-1].fill_(numel - block * (count - 1))  # assigned, a GPU would be waited for
    return lengths


def per_scale(rows: Tensor, scales: Tensor) -> Tensor:
    """`rows` `[blocks, block]` divided by `scales` `[blocks]`; a block whose scale is zero stays as it is.

    Scales are those that are sent, in float32: both sides then compute with the same.
    """
    divisor = torch.where(scales == 0, 1.0, scales).to(rows.dtype)
    return rows / divisor[:, None]


def times_scale(rows: Tensor, scales: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The vector `[numel]` of `rows` `[blocks, block]` times `scales` `[blocks]`, in `dtype`."""
    return (rows.to(dtype) * scales.to(dtype)[:, None]).view(-1)[:numel]
