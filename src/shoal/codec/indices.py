"""Places in a vector, packed: ascending, the low 16 bits of each, and how many lie in each run of 65,536 numbers.

2 bytes a place, and 4 bytes a run, instead of the 8 bytes of an int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.codec import Field
from shoal.codec.stated import RUN


def index_fields(numel: int, count: int) -> tuple[Field, Field]:
    """The tensors that `pack_indices` makes of `count` places in a vector of `numel`."""
    return Field(torch.int32, -(-numel // RUN)), Field(torch.int16, count)


def pack_indices(places: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(numbers of places in each run, low bits) of `places`, int64 `[count]`, ascending, all below `numel`."""
    runs = torch.bincount(places >> 16, minlength=-(-numel // RUN)).to(torch.int32)
    return runs, (places & (RUN - 1)).to(torch.int16)


def unpack_indices(runs: Tensor, low: Tensor) -> Tensor:
    """int64 `[count]`, the inverse of `pack_indices`."""
    numbers = torch.arange(runs.numel(), device=runs.device)
    run = torch.repeat_interleave(numbers, runs.long(), output_size=low.numel())
    return (run << 16) | (low.long() & (RUN - 1))
