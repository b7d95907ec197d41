"""`Masks`: which weights of a model are kept, a bit each, the same on every rank.

`bits[name]` is uint8 `[ceil(numel / 8)]`, the mask of the whole parameter `name` of the unsplit model, row by row, the
first weight in the lowest bit. A rank has the bits of the parameters that it has a part of, whatever that part is: they
are a 32nd of the weights, so that masks need no sharding, a checkpoint of one layout is one of all, and a mask is
broadcast as it is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.topology.holding import Box, Dims


def packed(mask: Tensor) -> Tensor:
    """The bits of a mask of any shape, uint8 `[ceil(numel / 8)]`."""
    flat = torch.zeros(packed_bytes(mask.numel()) * 8, dtype=torch.uint8, device=mask.device)
    flat[: mask.numel()] = mask.reshape(-1)
    return (flat.view(-1, 8) << _places(mask.device)).sum(1, dtype=torch.uint8)


def unpacked(bits: Tensor, shape: Dims) -> Tensor:
    """The mask of `shape` that `packed` gave `bits` of."""
    numel = torch.Size(shape).numel()
    return (bits[:, None] >> _places(bits.device) & 1).view(-1)[:numel].bool().view(shape)


def packed_bytes(numel: int) -> int:
    """Bytes of a mask of so many weights."""
    return -(-numel // 8)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@dataclass
class Masks:
    """`version` counts changes. `all_sent`: in this step gradients of masked weights are wanted, too. `frozen` are the
    parameters that have no gradient in this step.
    """

    bits: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    all_sent: bool = False
    frozen: frozenset[str] = frozenset()

    def whole(self, name: str, shape: Dims) -> Tensor | None:
        """The mask of the whole parameter of `shape`; None where there is none yet, and everything is kept."""
        bits = self.bits.get(name)
        return None if bits is None else unpacked(bits, shape)

    def held(self, name: str, shape: Dims, boxes: Sequence[Box]) -> Tensor | None:
        """That of the parts `boxes` of it, one after the other, flat."""
        whole = self.whole(name, shape)
        return None if whole is None else torch.cat([whole[box.slices].reshape(-1) for box in boxes])
