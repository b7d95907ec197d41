"""Causal attention of which a mask keeps some blocks, at a cost in proportion to the kept ones.

    for each block of queries       gather the blocks of keys and values that one of its tokens may see
                                    one softmax over them, the tokens that it may not see masked

A mask is data: `kept_blocks` says which blocks of keys a block of queries needs, `may_see` which of their tokens a
token sees. All of it is plain tensors, and one call of PyTorch's attention takes all blocks of queries, so that it
runs on any device, with autograd; the memory of gathered keys and values is that of the kept blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import UserCodeError
from shoal.maths.counter import bits, key_of
from shoal.models.attention_config import BigBird, BlockLists, SparseAttentionConfig
from shoal.models.layers import CausalAttention

NO_BLOCK = -1


def kept_blocks(config: SparseAttentionConfig, blocks: int) -> list[list[int]]:
    """The blocks of keys that each of `blocks` blocks of queries needs, ascending, its own among them."""
    if isinstance(config, BigBird):
        return [_of_big_bird(config, block) for block in range(blocks)]
    if isinstance(config, BlockLists):
        return _of_lists(config, blocks)
    reach = (config.window - 1) * config.dilation
    first = -(-config.global_tokens // config.block)
    found = []
    for block in range(blocks):
        lowest = max(0, block * config.block - reach) // config.block
        found.append(sorted({*range(min(first, block)), *range(lowest, block + 1)}))
    return found


def _of_big_bird(config: BigBird, block: int) -> list[int]:
    lowest = max(0, block + 1 - config.window_blocks)
    kept = {*range(min(config.global_blocks, block)), *range(lowest, block + 1)}
    others = [other for other in range(block) if other not in kept]
    draws = bits(key_of(config.seed, "bigbird", block), torch.arange(len(others))).tolist()
    drawn = sorted(zip(draws, others, strict=True))[: config.random_blocks]
    return sorted(kept | {other for _, other in drawn})


def _of_lists(config: BlockLists, blocks: int) -> list[list[int]]:
    if blocks > len(config.kept):
        raise UserCodeError(
            f"model.attention.kept has {len(config.kept)} lists of blocks of {config.block} tokens, for sequences of "
            f"at most {config.tokens}, and one is longer: give {blocks} lists, or shorter sequences"
        )
    return [sorted({*seen, block}) for block, seen in enumerate(config.kept[:blocks])]


def may_see(config: SparseAttentionConfig, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether the token at each place of `queries` sees that at each place of `keys`, whose block is kept; they
    broadcast.
    """
    before = keys <= queries
    if isinstance(config, BigBird | BlockLists):
        return before
    distance = queries - keys
    near = (distance < config.window * config.dilation) & (distance % config.dilation == 0)
    return before & (near | (keys < config.global_tokens))


class GatheredBlocks(NamedTuple):
    """Of `n` blocks of queries: `kept` `[n, k]` int64, padded with any block; `seen` `[n, 1, block, k x block]`."""

    kept: Tensor
    seen: Tensor


class SparseAttention(CausalAttention):
    """softmax(q k^T / sqrt(head_size)) v over the tokens that `config` lets a token see, of its own document."""

    def __init__(self, config: SparseAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self._gathered: tuple[tuple[int, torch.device], GatheredBlocks] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """As `CausalAttention`. `query` `[batch, heads, seq, head_size]`, `key` and `value` with `kv_heads`."""
        length, size = query.shape[2], self.config.block
        missing = -length % size
        if missing:
            query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
            documents = None if documents is None else F.pad(documents, (0, missing), value=NO_BLOCK)
        gathered = self._blocks((length + missing) // size, query.device)
        seen = gathered.seen.expand(query.shape[0], -1, -1, -1, -1)
        if documents is not None:
            of_queries = documents.unflatten(1, (-1, size))
            of_keys = of_queries[:, gathered.kept].flatten(2)
            seen = seen & (of_queries[:, :, None, :, None] == of_keys[:, :, None, None, :])
        found = F.scaled_dot_product_attention(
            _in_blocks(query, size).flatten(0, 1),
            _taken(key, gathered.kept, size).flatten(0, 1),
            _taken(value, gathered.kept, size).flatten(0, 1),
            attn_mask=seen.flatten(0, 1),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        whole = found.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return whole[:, :, :length]

    def _blocks(self, blocks: int, device: torch.device) -> GatheredBlocks:
        """The last ones that were asked for are kept: the sequences of a run have mostly one length."""
        if self._gathered is None or self._gathered[0] != (blocks, device):
            self._gathered = (blocks, device), gathered_blocks(self.config, blocks, device)
        return self._gathered[1]


def gathered_blocks(config: SparseAttentionConfig, blocks: int, device: torch.device) -> GatheredBlocks:
    """What `config` keeps of sequences of so many blocks."""
    lists, size = kept_blocks(config, blocks), config.block
    most = max(len(each) for each in lists)
    kept = torch.tensor([each + [NO_BLOCK] * (most - len(each)) for each in lists], device=device)
    places = torch.arange(size, device=device)
    queries = (torch.arange(blocks, device=device)[:, None] * size + places)[:, :, None]
    keys = (kept[:, :, None] * size + places).flatten(1)[:, None, :]
    there = (kept != NO_BLOCK).repeat_interleave(size, dim=1)[:, None, :]
    seen = may_see(config, queries, keys) & there
    return GatheredBlocks(kept.clamp(min=0), seen[:, None])


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """`[batch, heads, seq, features]` to `[batch, blocks, heads, size, features]`."""
    return x.unflatten(2, (-1, size)).transpose(1, 2)


def _taken(x: Tensor, kept: Tensor, size: int) -> Tensor:
    """The blocks that each block of queries needs, `[batch, n, heads, k x size, features]`."""
    blocks = _in_blocks(x, size).index_select(1, kept.flatten()).unflatten(1, kept.shape)
    return blocks.transpose(2, 3).flatten(3, 4)
