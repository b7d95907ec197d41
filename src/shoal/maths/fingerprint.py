"""A fingerprint of tensors: 63 bits that change with any bit of them. One pass over memory; not cryptographic.

The bytes are taken as 32-bit words x_i, and multiplied in 64 bits. With odd weights that differ within a block, and
between blocks,

    h = sum_b v_b sum_i w_i x_(b, i)   modulo 2^64

A changed bit k < 32 of one word changes h by 2^k times an odd number, which is never 0 modulo 2^64. Sums modulo 2^64
do not depend on their order, so that devices and numbers of threads agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 14
PIECE_BLOCKS = 8
_MIX = 0x9E3779B97F4A7C15


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> int:
    """The fingerprint of `tensors` under their names, in 1, ..., 2^63 - 1; the order of the mapping is not in it."""
    total = 0
    for name, tensor in tensors.items():
        about = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        key = int.from_bytes(hashlib.blake2b(about, digest_size=8).digest(), "big") | 1
        total += key * (_words_sum(tensor) + _MIX)
    digest = hashlib.blake2b((total % 2**64).to_bytes(8, "big"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def _words_sum(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    words = data[:whole].view(torch.int32) if data.data_ptr() % 4 == 0 else data[:whole].clone().view(torch.int32)
    blocks = words.numel() // BLOCK_WORDS
    weights = _odd(torch.arange(BLOCK_WORDS, dtype=torch.int64, device=data.device))
    body = words[: blocks * BLOCK_WORDS].view(blocks, BLOCK_WORDS)
    total = 0
    if blocks:
        # In pieces that stay in a cache: a product of the whole would be written to memory and read again.
        sums = torch.cat([(piece * weights).sum(1) for piece in body.split(PIECE_BLOCKS)])
        total = int((sums * _odd(torch.arange(blocks, dtype=torch.int64, device=data.device))).sum())
    rest = words[blocks * BLOCK_WORDS :]
    total += 3 * int((rest * weights[: rest.numel()]).sum())
    tail = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return (total + 5 * tail) % 2**64


def _odd(index: Tensor) -> Tensor:
    """Odd weights that differ, spread over 64 bits."""
    return (index * 2 + 1) * (_MIX - 2**64)
