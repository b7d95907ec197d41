"""Small integers in bytes: m digits of base b in one, the first the least significant.

base 2    8 in a byte      signs
base 3    5 in a byte      -1, 0 and 1, at 1.6 bits each (3^5 = 243)
base 16   2 in a byte
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
