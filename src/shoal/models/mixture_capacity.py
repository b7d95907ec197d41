"""Capacity: how many tokens of one sequence an expert takes (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961).

    capacity = ceil(capacity_factor * top_k * length / experts)

It is counted in each sequence by itself, and the first tokens are the ones that stay. So what is dropped depends
neither on the batch a sequence is in, nor on how it is split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SPAN = 1 << 32
"""Positions are below it, so that one integer holds (sequence, expert, position) in this order."""
NEVER = torch.iinfo(torch.int64).max


def capacity_of(lengths: Tensor, *, factor: float, top_k: int, experts: int) -> Tensor:
    """Tokens that an expert takes of sequences of `lengths` int64 `[batch]`; as `lengths`."""
    return torch.ceil(lengths.double() * (factor * top_k) / experts).long()


def within_capacity(
    chosen: Tensor,
    places: Tensor,
    *,
    real: Tensor,
    capacity: Tensor,
    experts: int,
    gather: Callable[[Tensor], Tensor],
) -> Tensor:
    """Which choices are kept, bool `[batch, seq, top_k]`; those of padding are not, and take no room.

    `chosen` `[batch, seq, top_k]`, `places` and `real` `[batch, seq]`, `capacity` `[batch]`. `gather(keys)` brings the
    keys of all ranks that hold parts of the same sequences, and perhaps `NEVER`s. How many of a sequence chose the same
    expert before is the distance between two places in the sorted keys.
    """
    sequence = torch.arange(chosen.shape[0], device=chosen.device)[:, None, None]
    first = (sequence * experts + chosen) * SPAN
    keys = torch.where(real[..., None], first + places[..., None], NEVER)
    everyone = gather(keys).sort().values
    earlier = torch.searchsorted(everyone, keys) - torch.searchsorted(everyone, first)
    return real[..., None] & (earlier < capacity[:, None, None])
