"""A decoder-only transformer: pre-norm blocks of attention and feed-forward on a residual stream.

    x <- x + attention(norm(x))
    x <- x + feed_forward(norm(x))

RMSNorm (arXiv:1910.07467), rotary positions, no biases. The feed-forward of some blocks may be a mixture of experts.
Weights start at N(0, 0.02^2); the projections that write into the residual stream at 0.02 / sqrt(2 layers), so that its
variance does not grow with depth (GPT-2).

With `scaling = "mup"` (Yang et al., arXiv:2203.03466, table 3) and m = width / base_width, inner weights start at
1/sqrt(m) of that and the head and routers at 1/m; rates follow from the roles (`shoal.optim.mup`). Heads keep their
size, so that the scale of attention stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.maths.counter import bits, key_of
from shoal.models.config import BigBird, Causal, GPTConfig, MoEConfig, SparseAttentionConfig
from shoal.models.layers import GELU, Attention, CausalAttention, KeyedDropout, SwiGLU, rotations
from shoal.models.mixture import Mixture, MixtureOptions
from shoal.models.roles import ONES, Normal, Part, Role, run_chain, widened

# Causal attention of which a mask keeps some blocks, at a cost in proportion to the kept ones.
#
#     for each block of queries       gather the blocks of keys and values that one of its tokens may see
#                                     one softmax over them, the tokens that it may not see masked
#
# A mask is data: `kept_blocks` says which blocks of keys a block of queries needs, `may_see` which of their tokens a
# token sees. All of it is plain tensors, and one call of PyTorch's attention takes all blocks of queries, so that it
# runs on any device, with autograd; the memory of gathered keys and values is that of the kept blocks.


NO_BLOCK = -1


def kept_blocks(config: SparseAttentionConfig, blocks: int) -> list[list[int]]:
    """The blocks of keys that each of `blocks` blocks of queries needs, ascending, its own among them."""
    if isinstance(config, BigBird):
        return [_of_big_bird(config, block) for block in range(blocks)]
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


def may_see(config: SparseAttentionConfig, queries: Tensor, keys: Tensor) -> Tensor:
    """Whether the token at each place of `queries` sees that at each place of `keys`, whose block is kept; they
    broadcast.
    """
    before = keys <= queries
    if isinstance(config, BigBird):
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


INIT_STD = 0.02


@dataclass(frozen=True)
class GPTContext:
    """What goes along with the activations: tokens, positions and documents `[batch, seq]`, factors of `rotations`."""

    tokens: Tensor
    positions: Tensor | None
    documents: Tensor | None
    factors: Tensor


class GPT(nn.Module):
    """Tokens to the logits of the tokens that follow; of kind "moe", with mixtures of experts."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, mixture = config.width, _mixture_options(config) if isinstance(config, MoEConfig) else None
        self.head_size, self.rope_base = width // config.heads, config.rope_base
        self.times_base = None if config.base_width is None else width / config.base_width
        # `initialise` draws the first values; nn.Embedding's own, normal ones on the meta device, cost 2 s of imports.
        self.embedding = nn.Embedding.from_pretrained(torch.zeros(config.vocabulary, width), freeze=False)
        self.dropout = KeyedDropout(config.dropout, "embedding")
        dense = SwiGLU if config.feed_forward == "swiglu" else GELU

        def block(index: int) -> Block:
            name = f"blocks.{index}"
            attention = Attention(width, heads=config.heads, kv_heads=config.key_value_heads, core=_core(config))
            kind, layer = Block, dense(width, config.hidden_width)
            if mixture is not None and mixture.holds(index):
                kind, layer = MixtureBlock, Mixture(width, mixture, feed_forward=config.feed_forward, name=name)
            return kind(attention, layer, width=width, dropout=config.dropout, norm_eps=config.norm_eps, name=name)

        self.blocks = nn.ModuleList(block(index) for index in range(config.layers))
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Integer tokens `[batch, seq]` to logits `[batch, seq, vocabulary]`.

        `positions` `[batch, seq]` (int64) are the tokens' places in their samples, for rotary positions and dropout;
        default 0, 1, 2, ... Attention stays causal in the order in which the tokens are given. `documents` `[batch,
        seq]` (integers) number the documents of a packed sequence: no token sees one of another document.
        """
        return run_chain(self, tokens, positions, documents)

    def context(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> GPTContext:
        """What every part of the chain needs beside the activations."""
        places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        factors = rotations(places, head_size=self.head_size, base=self.rope_base)
        return GPTContext(tokens, positions, documents, factors)

    def parts(self) -> list[Part]:
        """See `shoal.models.roles`."""
        blocks = [Part(f"blocks.{i}", (f"blocks.{i}",), partial(self._block, i)) for i in range(len(self.blocks))]
        first = Part("embedding", ("embedding", "dropout"), self._embed)
        return [first, *blocks, Part("head", ("norm", "head"), self._logits)]

    def _embed(self, x: Tensor | None, context: GPTContext) -> Tensor:
        return self.dropout(self.embedding(context.tokens), context.positions)

    def _block(self, index: int, x: Tensor, context: GPTContext) -> Tensor:
        return self.blocks[index](x, context.factors, context.positions, context.documents)

    def _logits(self, x: Tensor, context: GPTContext) -> Tensor:
        return self.head(self.norm(x))

    def parameter_roles(self) -> dict[str, Role]:
        """See `shoal.models.roles`."""
        times = self.times_base or 1.0
        inner = Normal(INIT_STD / math.sqrt(times))
        residual = Normal(INIT_STD / math.sqrt(2 * len(self.blocks) * times))
        last = Normal(INIT_STD / times)
        outer, hidden, output = (widened(grows, self.times_base) for grows in ("input", "hidden", "output"))
        columns = ("query", "key", "value", "gate", "up")
        return {
            "embedding.weight": Role("embedding", Normal(INIT_STD), True, outer),
            "head.weight": Role("head", last, True, output),
            "*norm.weight": Role("norm", ONES, False, outer),
            **{f"*.{name}.weight": Role("column", inner, True, hidden) for name in columns},
            **{f"*.{name}.weight": Role("row", residual, True, hidden) for name in ("output", "down")},
            "*.router.weight": Role("router", last, True, output),
            "*.experts.down": Role("expert", residual, True, hidden),
            "*.experts.*": Role("expert", inner, True, hidden),
        }


class Block(nn.Module):
    """One attention and one feed-forward, each behind its norm and before its dropout."""

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, *, width: int, dropout: float, norm_eps: float, name: str
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=norm_eps)
        self.attention = attention
        self.attention_dropout = KeyedDropout(dropout, f"{name}.attention")
        self.feed_forward_norm = nn.RMSNorm(width, eps=norm_eps)
        self.feed_forward = feed_forward
        self.feed_forward_dropout = KeyedDropout(dropout, f"{name}.feed_forward")

    def forward(
        self, x: Tensor, factors: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """`x` `[batch, seq, width]`; the others as in `GPTContext`."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), factors, documents), positions)
        return x + self.feed_forward_dropout(self._fed_forward(self.feed_forward_norm(x), positions), positions)

    def _fed_forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return self.feed_forward(x)


class MixtureBlock(Block):
    """A block whose feed-forward is a `Mixture`: how far a token has come in its sequence counts for its capacity."""

    def _fed_forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return self.feed_forward(x, positions)


def _core(config: GPTConfig) -> CausalAttention:
    return CausalAttention() if isinstance(config.attention, Causal) else SparseAttention(config.attention)


def _mixture_options(config: MoEConfig) -> MixtureOptions:
    return MixtureOptions(
        experts=config.experts,
        top_k=config.top_k,
        expert_width=config.width_of_expert,
        shared_experts=config.shared_experts,
        gate=config.gate,
        normalise_gates=config.gates_normalised,
        capacity_factor=config.capacity_factor,
        balance=config.balance,
        balance_coefficient=config.balance_coefficient,
        bias_rate=config.bias_rate,
        router_z_loss=config.router_z_loss,
        every=config.moe_every,
        first_dense=config.first_dense,
    )
