"""Block-structured top-k: the blocks of largest 2-norm, whole, and which they are.

    y = x in the k blocks of largest |x_b|_2, and zero elsewhere

Top-k (`top_k`), of blocks on a fixed grid instead of numbers. It leaves |x - y|^2 <= (1 - k/b) |x|^2 of b blocks:
biased, it needs error feedback. A place costs 4 bytes a block instead of 2 a number, memory is read and written in
runs, and only the norms of blocks are compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codec.blocks import block_count, in_blocks
from shoal.codec.codec import Codec, Field, Payload
from shoal.codec.config import BlockTopKConfig
from shoal.codec.stated import kept


class BlockTopK(Codec):
    """`BlockTopKConfig`, on the wire."""

    def __init__(self, config: BlockTopKConfig) -> None:
        self._fraction, self._block = config.fraction, config.block

    def fields(self, numel: int) -> tuple[Field, ...]:
        count = kept(self._fraction, block_count(numel, self._block))
        return Field(torch.float32, count * self._block), Field(torch.int32, count)

    def _encode(self, x: Tensor, key: int) -> Payload:
        rows = in_blocks(x, self._block)
        count = kept(self._fraction, len(rows))
        blocks = torch.linalg.vector_norm(rows, dim=1).topk(count, sorted=False).indices.sort().values
        return rows[blocks].view(-1).float(), blocks.to(torch.int32)

    def _decode(self, payload: Payload, numel: int, key: int, dtype: torch.dtype) -> Tensor:
        values, blocks = payload
        rows = torch.zeros(block_count(numel, self._block), self._block, dtype=dtype, device=values.device)
        rows[blocks.long()] = values.to(dtype).view(-1, self._block)
        return rows.view(-1)[:numel]
