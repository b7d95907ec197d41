"""Counter-based random numbers: number i of a stream is a pure function of (key, i), so any part is drawn alone.

SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) walks the states
key + gamma, key + 2 gamma, ... and hashes each. Evaluated per index it needs no walk:

    bits(key, i) = mix(key + (i + 1) gamma  mod 2^64)

There is no state to save, to advance or to share: a shard of a parameter or the dropout mask of one sample comes out
the same whoever draws it, in whatever order and company. Sums and products wrap in torch's int64 as they do modulo
2^64; only the shifts need a mask, because torch shifts the sign in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """The int64 that has the bits of `word` modulo 2^64."""
    return (word + 2**63) % 2**64 - 2**63


GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


@lru_cache(maxsize=4096)
def key_of(seed: int, *names: str | int) -> int:
    """A 64-bit key, as a signed integer, from a seed and a path of names; `1` and `"1"` are different names."""
    text = b""
    for part in (seed, *names):
        kind, own = (b"s", part.encode()) if isinstance(part, str) else (b"i", b"%d" % part)
        text += b"%s%d:%s" % (kind, len(own), own)
    digest = hashlib.blake2b(text, digest_size=8, person=b"shoal-counter").digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """64 random bits for each counter.

    `key` is any integer (taken modulo 2^64) or an int64 tensor that broadcasts against `counters`, int64 of any shape
    and device. Returns int64 of the broadcast shape.
    """
    first = key + GAMMA if isinstance(key, Tensor) else _signed(key + GAMMA)
    state = counters * GAMMA + first
    state = (state ^ _shift_right(state, 30)) * MIX_1
    state = (state ^ _shift_right(state, 27)) * MIX_2
    return state ^ _shift_right(state, 31)


def uniform(key: int | Tensor, counters: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number of the open interval (0, 1) for each counter, in the broadcast shape of `key` and `counters`.

    They are the midpoints (k + 1/2) eps of a grid as fine as `dtype` holds exactly up to 1 (eps = 2^-23 for float32),
    so that neither 0 nor 1 can come out, not even by rounding.
    """
    eps = torch.finfo(dtype).eps
    grid_bits = round(-math.log2(eps))
    cells = _shift_right(bits(key, counters), 64 - grid_bits)
    return ((cells.to(torch.float64) + 0.5) * eps).to(dtype)


def normal(key: int | Tensor, counters: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """One standard normal number for each counter (Box and Muller 1958), computed in float64 and then rounded.

        z_i = sqrt(-2 ln u_2i) cos(2 pi u_2i+1)

    The second number of each pair is given up: one counter is one normal, so that any slice can be drawn alone.
    """
    radius = (-2 * uniform(key, 2 * counters, dtype=torch.float64).log()).sqrt()
    angle = 2 * math.pi * uniform(key, 2 * counters + 1, dtype=torch.float64)
    return (radius * angle.cos()).to(dtype)


def indices(
    global_shape: Sequence[int],
    offsets: Sequence[int],
    shape: Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """The flat (row-major) index, in a tensor of `global_shape`, of every element of the box at `offsets`.

    Returns int64 of `shape`. Raises `ValueError` where the box is not inside.
    """
    _check_inside(global_shape, offsets, shape)
    flat = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, length in zip(global_shape, offsets, shape, strict=True):
        flat = flat[..., None] * size + torch.arange(offset, offset + length, dtype=torch.int64, device=device)
    return flat


def _check_inside(global_shape: Sequence[int], offsets: Sequence[int], shape: Sequence[int]) -> None:
    same_rank = len(global_shape) == len(offsets) == len(shape)
    if not same_rank or any(o < 0 or n < 0 or o + n > s for s, o, n in zip(global_shape, offsets, shape, strict=True)):
        raise ValueError(
            f"a box of shape {list(shape)} at {list(offsets)} is not inside a tensor of shape {list(global_shape)}: "
            "offset + length may not exceed the tensor's size in any dimension; correct the box"
        )


def _shift_right(word: Tensor, places: int) -> Tensor:
    """The logical shift: zeros come in from the left."""
    return (word >> places) & ((1 << (64 - places)) - 1)
