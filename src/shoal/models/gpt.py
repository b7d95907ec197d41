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

import torch
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.adapters import SoftPrompt
from shoal.models.attention_config import Causal
from shoal.models.config import GPTConfig, MoEConfig
from shoal.models.layers import GELU, Attention, CausalAttention, KeyedDropout, SwiGLU, rotations
from shoal.models.mixture import Mixture, MixtureOptions
from shoal.models.roles import ONES, Normal, Part, Role, run_chain, widened
from shoal.models.sparse_attention import SparseAttention

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
        self.head_size, self.rope_base = config.size_of_head, config.rope_base
        self.times_base = None if config.base_width is None else width / config.base_width
        # `initialise` draws the first values; nn.Embedding's own, normal ones on the meta device, cost 2 s of imports.
        self.embedding = nn.Embedding.from_pretrained(torch.zeros(config.vocabulary, width), freeze=False)
        self.dropout = KeyedDropout(config.dropout, "embedding")
        dense = SwiGLU if config.feed_forward == "swiglu" else GELU

        def block(index: int) -> Block:
            name = f"blocks.{index}"
            attention = Attention(
                width,
                heads=config.heads,
                kv_heads=config.key_value_heads,
                head_size=config.size_of_head,
                core=_core(config),
            )
            kind, layer = Block, dense(width, config.hidden_width)
            if mixture is not None and mixture.holds(index):
                kind, layer = MixtureBlock, Mixture(width, mixture, feed_forward=config.feed_forward, name=name)
            return kind(attention, layer, width=width, dropout=config.dropout, norm_eps=config.norm_eps, name=name)

        self.blocks = nn.ModuleList(block(index) for index in range(config.layers))
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.prompt: SoftPrompt | None = None
        self.prompt_tokens = 0

    def take_prompt(self, count: int) -> None:
        """Has every sequence begin with `count` trained vectors, for which there are no logits."""
        self.prompt, self.prompt_tokens = SoftPrompt(count, self.embedding.weight), count

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Integer tokens `[batch, seq]` to logits `[batch, seq, vocabulary]`.

        `positions` `[batch, seq]` (int64) are the tokens' places in their samples, for rotary positions and dropout;
        default 0, 1, 2, ... Attention stays causal in the order in which the tokens are given. `documents` `[batch,
        seq]` (integers) number the documents of a packed sequence: no token sees one of another document.
        """
        return run_chain(self, tokens, positions, documents)

    def context(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> GPTContext:
        """What every part of the chain needs beside the activations."""
        if self.prompt_tokens and (positions is not None or documents is not None):
            raise UserCodeError(
                'adapter.kind = "prompt": a prompt stands before a whole sequence, and this one holds several '
                'documents or a part of one; use data.packing = "pad"'
            )
        length = self.prompt_tokens + tokens.shape[1]
        places = torch.arange(length, device=tokens.device) if positions is None else positions
        factors = rotations(places, head_size=self.head_size, base=self.rope_base)
        return GPTContext(tokens, positions, documents, factors)

    def parts(self) -> list[Part]:
        """See `shoal.models.roles`."""
        blocks = [Part(f"blocks.{i}", (f"blocks.{i}",), partial(self._block, i)) for i in range(len(self.blocks))]
        first = Part("embedding", ("embedding", *(["prompt"] if self.prompt_tokens else []), "dropout"), self._embed)
        return [first, *blocks, Part("head", ("norm", "head"), self._logits)]

    def _embed(self, x: Tensor | None, context: GPTContext) -> Tensor:
        embedded = self.embedding(context.tokens)
        return self.dropout(embedded if self.prompt is None else self.prompt(embedded), context.positions)

    def _block(self, index: int, x: Tensor, context: GPTContext) -> Tensor:
        return self.blocks[index](x, context.factors, context.positions, context.documents)

    def _logits(self, x: Tensor, context: GPTContext) -> Tensor:
        return self.head(self.norm(x[:, self.prompt_tokens :]))

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
