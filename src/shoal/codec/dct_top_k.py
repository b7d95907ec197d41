"""DCT top-k: the largest frequencies of every chunk.

    f = D x,   y = D^T (the k largest of f),      D_uv = sqrt(2 / c) cos(pi (2 v + 1) u / 2 c), row 0 over sqrt(2)

(Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, algorithm 1.) D is orthonormal, so
|x - y|^2 <= (1 - k/c) |x|^2 in a chunk of c numbers: biased. DeMo takes what was sent out of a decaying momentum, and
keeps the rest; here error feedback keeps the rest of the gradients, without decay.

Chunks are runs of the flat buffer, not squares of a matrix as in the paper's code: so they do not depend on shapes. A
number costs 4 bytes, its place 1 (chunks of up to 256).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import DCTTopKConfig


class DCTTopK(Codec):
    """`DCTTopKConfig`, on the wire."""

    def __init__(self, config: DCTTopKConfig) -> None:
        self._chunk, self._kept = config.chunk, config.kept
        self._basis = cosines(config.chunk)

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = block_count(numel, self._chunk) * self._kept
        return Field(torch.float32, count), Field(torch.uint8, count)

    def _encode(self, x: Tensor, key: int) -> Payload:
        frequencies = in_blocks(x, self._chunk) @ self._basis.to(x).T
        places = frequencies.abs().topk(self._kept, dim=1).indices
        return frequencies.gather(1, places).view(-1).float(), places.view(-1).to(torch.uint8)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, places = (part.view(-1, self._kept) for part in payload)
        frequencies = torch.zeros(len(values), self._chunk, dtype=dtype, device=values.device)
        frequencies.scatter_(1, places.long(), values.to(dtype))
        grid = _grid(values).to(dtype)[:, None]
        return (frequencies @ self._basis.to(frequencies)).div_(grid).round_().mul_(grid).view(-1)[:numel]


def _grid(values: Tensor) -> Tensor:
    """For each row, 2^-24 of the power of two above its largest magnitude.

    Decoded numbers are multiples of it: what the transform's rounding adds far below them would make x - y inexact.
    """
    _, exponent = torch.frexp(values.abs().amax(1))
    return torch.ldexp(torch.ones(len(values), device=values.device), exponent.clamp(min=-100) - 24)


def cosines(size: int) -> Tensor:
    """The orthonormal DCT-II, float64 `[frequency, place]`."""
    frequency, place = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    basis = math.sqrt(2 / size) * torch.cos(math.pi * (2 * place + 1) * frequency / (2 * size))
    basis[0] /= math.sqrt(2)
    return basis
