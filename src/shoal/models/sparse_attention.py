"""Causal attention of which a mask keeps some blocks, at a cost in proportion to the kept ones.

    for each block of queries       gather the blocks of keys and values that one of its tokens may see
                                    one softmax over them, the tokens that it may not see masked

A mask is data: `kept_blocks` says which blocks of keys a block of queries needs, `may_see` which of their tokens a
token sees. All of it is plain tensors, and one call of PyTorch's attention takes all blocks of queries, so that it
runs on any device, with autograd; the memory of gathered keys and values is that of the kept blocks.

On GPUs the same lists go to FlexAttention (arXiv:2412.05496), which gathers nothing: its kernel goes through the blocks
of keys that a list names. It has no backward on CPUs, and no kernel for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

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


class WholeSequences:
    """softmax(q k^T / sqrt(head_size)) v over the tokens that `config` lets a token see, of its own document."""

    def __init__(self, config: SparseAttentionConfig) -> None:
        self.config = config
        self._gathered: tuple[tuple[int, torch.device], GatheredBlocks] | None = None
        self._flex: tuple[tuple[int, torch.device], Any] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """`query` `[batch, heads, seq, head_size]`, `key` and `value` with `kv_heads`, a divisor; as `query`.

        Raises `UserCodeError` for `form = "flex"` where there is no such kernel.
        """
        if takes_flex(self.config, query):
            return self._by_flex(query, key, value, documents)
        length, size = query.shape[2], self.config.block
        missing = -length % size
        if missing:
            query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
            documents = None if documents is None else F.pad(documents, (0, missing), value=NO_BLOCK)
        numbers = None if documents is None else documents.unflatten(1, (-1, size))
        gathered = self._blocks((length + missing) // size, query.device)
        found = attend_blocks(
            in_blocks(query, size),
            in_blocks(key, size),
            in_blocks(value, size),
            gathered,
            documents=None if numbers is None else (numbers, numbers),
        )
        return found[:, :, :length]

    def _by_flex(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        where = query.shape[2], query.device
        if self._flex is None or self._flex[0] != where:
            self._flex = where, flex_mask(self.config, *where)
        mask = self._flex[1]
        if documents is not None:
            mask = _of_documents(mask, documents)
        return compiled_flex()(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])

    def _blocks(self, blocks: int, device: torch.device) -> GatheredBlocks:
        """The last ones that were asked for are kept: the sequences of a run have mostly one length."""
        if self._gathered is None or self._gathered[0] != (blocks, device):
            found = gathered_blocks(self.config, blocks, range(blocks), device=device)
            self._gathered = (blocks, device), found
        return self._gathered[1]


class SparseAttention(CausalAttention):
    """`WholeSequences` as the core of a model's attention."""

    def __init__(self, config: SparseAttentionConfig) -> None:
        super().__init__()
        self.config = config
        self._whole = WholeSequences(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """As `CausalAttention`."""
        return self._whole(query, key, value, documents)

    def of_last(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """The same for the last tokens of sequences, whose keys and values are all there, as in generation.

        Raises `UserCodeError` for a cache that is longer than its sequences.
        """
        length = key.shape[2]
        if documents is not None and documents.shape[1] != length:
            raise UserCodeError(
                f"the cache has room for {length} tokens, of which {documents.shape[1]} are there, and attention under "
                "a mask of [model.attention] cannot tell which: generate with a cache that grows, or use_cache=False"
            )
        places = torch.arange(length, device=query.device)
        queries = places[-query.shape[2] :, None]
        seen_at = _seen_at(self.config, kept_blocks(self.config, -(-length // self.config.block)), query.device)
        seen = seen_at(queries, queries, queries, places).expand(len(query), 1, -1, -1)
        if documents is not None:
            seen = seen & (documents[:, None, -query.shape[2] :, None] == documents[:, None, None])
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=query.shape[1] != key.shape[1]
        )


def gathered_blocks(
    config: SparseAttentionConfig, blocks: int, rows: Sequence[int], *, device: torch.device
) -> GatheredBlocks:
    """What `config` keeps for the blocks of queries `rows`, of sequences of `blocks` blocks."""
    size, every = config.block, kept_blocks(config, blocks)
    lists = [every[row] for row in rows]
    most = max(len(each) for each in lists)
    kept = torch.tensor([each + [NO_BLOCK] * (most - len(each)) for each in lists], device=device)
    places = torch.arange(size, device=device)
    queries = (torch.tensor(list(rows), device=device)[:, None] * size + places)[:, :, None]
    keys = (kept[:, :, None] * size + places).flatten(1)[:, None, :]
    there = (kept != NO_BLOCK).repeat_interleave(size, dim=1)[:, None, :]
    seen = may_see(config, queries, keys) & there
    return GatheredBlocks(kept.clamp(min=0), seen[:, None])


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredBlocks, *, documents: tuple[Tensor, Tensor] | None
) -> Tensor:
    """`query` `[batch, n, heads, block, features]`, `key` and `value` `[batch, m, kv_heads, block, features]`, whose
    places among the `m` are in `gathered.kept`; `[batch, heads, n x block, features]`.

    `documents` are the numbers of the queries' documents `[batch, n, block]`, and of the keys' `[batch, m, block]`.
    """
    seen = gathered.seen.expand(query.shape[0], -1, -1, -1, -1)
    if documents is not None:
        of_queries, of_keys = documents
        of_keys = of_keys[:, gathered.kept].flatten(2)
        seen = seen & (of_queries[:, :, None, :, None] == of_keys[:, :, None, None, :])
    found = F.scaled_dot_product_attention(
        query.flatten(0, 1),
        _taken(key, gathered.kept).flatten(0, 1),
        _taken(value, gathered.kept).flatten(0, 1),
        attn_mask=seen.flatten(0, 1),
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return found.unflatten(0, (query.shape[0], -1)).transpose(1, 2).flatten(2, 3)


def in_blocks(x: Tensor, size: int) -> Tensor:
    """`[batch, heads, seq, features]` to `[batch, blocks, heads, size, features]`."""
    return x.unflatten(2, (-1, size)).transpose(1, 2)


def _taken(blocks: Tensor, kept: Tensor) -> Tensor:
    """The blocks that each block of queries needs, `[batch, n, heads, k x size, features]`."""
    found = blocks.index_select(1, kept.flatten()).unflatten(1, kept.shape)
    return found.transpose(2, 3).flatten(3, 4)


# FlexAttention. Its blocks are of `FLEX_BLOCK` tokens, whatever those of the mask are: its kernels have tiles of up to
# as many. What of a block is not kept, its function of places says.

FLEX_BLOCK = 128
LEAST_FLEX_HEAD = 16
SeenAt = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From sample, head, and the places of a query and a key, to whether the one sees the other."""


def takes_flex(config: SparseAttentionConfig, query: Tensor) -> bool:
    """Whether FlexAttention computes it. Raises `UserCodeError` where it shall and cannot."""
    if config.form == "blocks":
        return False
    backward = query.requires_grad and query.device.type == "cpu"  # it asks for no more, whatever is recorded
    able = not backward and query.dtype != torch.float64 and query.shape[-1] >= LEAST_FLEX_HEAD
    if config.form == "flex" and not able:
        raise UserCodeError(
            'model.attention.form = "flex": FlexAttention has no backward on CPUs, no kernel for float64, and none for '
            f"heads of fewer than {LEAST_FLEX_HEAD} features, and this is {query.dtype} on a {query.device.type} with "
            f'{query.shape[-1]}; leave form out, or set it to "blocks"'
        )
    return able and (config.form == "flex" or (query.device.type == "cuda" and not torch.compiler.is_compiling()))


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled; imported here, because the import is slow."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # type: ignore[return-value]


def flex_mask(config: SparseAttentionConfig, length: int, device: torch.device) -> Any:
    """The `BlockMask` of sequences of `length` tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    kept = kept_blocks(config, -(-length // config.block))
    lists = _coarse(kept, config.block, length)
    numbers = torch.tensor([len(each) for each in lists], dtype=torch.int32, device=device)
    padded = [each + [0] * (len(lists) - len(each)) for each in lists]
    return BlockMask.from_kv_blocks(
        numbers[None, None],
        torch.tensor(padded, dtype=torch.int32, device=device)[None, None],
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_seen_at(config, kept, device),
        seq_lengths=(length, length),
    )


def _coarse(kept: Sequence[Sequence[int]], size: int, length: int) -> list[list[int]]:
    """For each block of `FLEX_BLOCK` tokens, the blocks that those of `size` tokens which begin or end in it need."""
    found: list[set[int]] = [set() for _ in range(-(-length // FLEX_BLOCK))]
    for row, blocks in enumerate(kept):
        needed = {coarse for block in blocks for coarse in _covering(block, size, length)}
        for coarse in _covering(row, size, length):
            found[coarse] |= needed
    return [sorted(block for block in blocks if block <= row) for row, blocks in enumerate(found)]


def _covering(block: int, size: int, length: int) -> range:
    return range(block * size // FLEX_BLOCK, (min((block + 1) * size, length) - 1) // FLEX_BLOCK + 1)


def _seen_at(config: SparseAttentionConfig, kept: Sequence[Sequence[int]], device: torch.device) -> SeenAt:
    """A window says by itself which blocks it keeps; the other kinds need a table of them."""
    if not isinstance(config, BigBird | BlockLists):
        return lambda sample, head, query, key: may_see(config, query, key)
    table = torch.zeros(len(kept), len(kept), dtype=torch.bool)
    for row, blocks in enumerate(kept):
        table[row, list(blocks)] = True
    there, size = table.to(device), config.block
    return lambda sample, head, query, key: may_see(config, query, key) & there[query // size, key // size]


def _of_documents(mask: Any, documents: Tensor) -> Any:
    """The same where a token sees those of its own document alone."""
    from torch.nn.attention.flex_attention import BlockMask

    seen = mask.mask_mod

    def apart(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen(sample, head, query, key) & (documents[sample, query] == documents[sample, key])

    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=apart, seq_lengths=mask.seq_lengths
    )
