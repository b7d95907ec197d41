"""A bucket whose gradients are summed by all-reduce and stay whole on every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.buckets.cut import Member, cut
from shoal.comm.collective import Collective, Handle
from shoal.maths.norm import two_norm

ALIGNMENT = 16  # elements: slices start on a cache line


@dataclass(frozen=True)
class Summand:
    """A parameter, the ranks over which its gradient is summed, and whether this rank's norm counts it."""

    name: str
    parameter: Parameter
    group: Collective
    counted: bool = True


@dataclass
class SummedBucket:
    """A flat buffer and the slices of it that are gradients. `counted`: those that this rank's norm counts.

    `share`: where ranks of the group share the norm, the part of the buffer that is this rank's to count.
    """

    flat: Tensor
    slices: dict[int, Tensor]
    group: Collective | None
    counted: Collection[int]
    share: slice | None = None
    missing: int = 0
    keeps: bool = True
    _handle: Handle | None = field(default=None, init=False)

    def slice(self, index: int) -> Tensor:
        """Where the gradient of parameter `index` belongs."""
        return self.slices[index]

    def start(self) -> None:
        """Nothing to forget: what is not filled is zeroed before it is sent."""
        self._handle = None

    def send(self) -> None:
        """Starts the sum."""
        self._handle = self.group.all_reduce(self.flat) if self.group is not None else None

    def settle(self) -> None:
        """Nothing follows the sum."""

    def wait(self) -> None:
        """Returns when every slice is the sum."""
        if self._handle is not None:
            self._handle.wait()

    def norm(self) -> Tensor:
        """The 2-norm of the slices that are counted, or of this rank's share, in float32 at least."""
        if self.share is not None:
            return two_norm(self.flat[self.share])
        return counted_norm(self.flat, self.slices, self.counted)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies every gradient."""
        self.flat.mul_(factor)


def summed_buckets(
    summands: Sequence[Summand], *, bucket_bytes: int, first_bucket_bytes: int, share_norm: bool = False
) -> list[SummedBucket]:
    """The buckets of one rank. Those of a group have the same members on all of its ranks.

    `share_norm`: each rank of a group takes the norm of its part of a bucket; all of them count everything in it.
    """
    members = []
    for index, summand in enumerate(summands):
        parameter = summand.parameter
        kind = (parameter.dtype, parameter.device, id(summand.group))
        members.append(Member(index, parameter.numel(), parameter.numel() * parameter.element_size(), kind))
    plan = cut(members, first_bytes=first_bucket_bytes, bytes_limit=bucket_bytes)
    return [_bucket([summands[m.index] for m in bucket], [m.index for m in bucket], share_norm) for bucket in plan]


def _bucket(summands: Sequence[Summand], indices: Sequence[int], share_norm: bool) -> SummedBucket:
    starts, end = aligned([s.parameter.numel() for s in summands])
    first = summands[0].parameter
    group = summands[0].group
    flat = group.allocate(end, dtype=first.dtype, device=first.device)
    slices = {
        index: flat[start : start + summand.parameter.numel()].view_as(summand.parameter)
        for index, start, summand in zip(indices, starts, summands, strict=True)
    }
    counted = [index for index, summand in zip(indices, summands, strict=True) if summand.counted]
    share = share_of(end, group.rank, group.size) if share_norm else None
    return SummedBucket(flat, slices, group if group.size > 1 else None, counted, share)


def share_of(length: int, rank: int, size: int) -> slice:
    """The part of a buffer that is one rank's, in whole cache lines."""
    lines = -(-length // ALIGNMENT)
    start, stop = (min(length, lines * r // size * ALIGNMENT) for r in (rank, rank + 1))
    return slice(start, stop)


def aligned(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where slices of these lengths begin in one buffer, each on a cache line, and how long it is."""
    starts, end = [], 0
    for length in lengths:
        starts.append(end)
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return starts, end


def counted_norm(flat: Tensor, slices: dict[int, Tensor], counted: Collection[int]) -> Tensor:
    """The 2-norm of those of `slices`; in one pass over `flat`, whose rest is zero, where all of them are counted."""
    if len(counted) == len(slices):
        return two_norm(flat)
    if not counted:
        return two_norm(flat[:0])
    return two_norm(torch.stack([two_norm(slices[index]) for index in counted]))
