"""`TokenExchange`: where the tokens of a mixture are, and how they reach the experts that they chose.

A mixture asks a few things of the world around it. With all tokens and all experts in one process the answers are
trivial (`LocalExchange`); a rank that holds a part of either puts another answer in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Apply = Callable[[Tensor, Tensor], Tensor]
"""Experts at work: rows `[m, width]` sorted by expert, and how many belong to each, int64; the same rows done."""


class TokenExchange(Protocol):
    """The surroundings of one mixture. Every rank of a group makes the same calls in the same order."""

    @property
    def local(self) -> bool:
        """Are all experts here, and no other rank with the same tokens?"""
        ...

    def split(self, x: Tensor) -> Tensor:
        """Of `x` `[batch, seq, width]`, the tokens `[batch, seq', width]` that this rank alone routes."""
        ...

    def join(self, x: Tensor, *, seq: int) -> Tensor:
        """The inverse of `split`, which had `seq` tokens of each sample."""
        ...

    def positions(self, given: Tensor | None, x: Tensor) -> Tensor:
        """The places `[batch, seq']` of the tokens of `split(x)` in their samples; None: counted from 0."""
        ...

    def part(self, per_token: Tensor) -> Tensor:
        """Of a fact `[batch, seq]` about each token of this rank's part of the samples, those of `split(x)`."""
        ...

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        """`sums` added up over the ranks that route other tokens of the same samples; without gradient."""
        ...

    def gather_over_sequence(self, keys: Tensor, *, fill: int, seq: int) -> Tensor:
        """The int64 `keys` `[batch, seq', n]` of all those ranks, flat and in any order; `fill` may be added.

        `seq` as for `join`.
        """
        ...

    def apply(self, rows: Tensor, counts: Tensor, experts: Apply) -> Tensor:
        """Each row `[m, width]`, sorted by expert, through its expert; `counts` int64, one for each expert of all."""
        ...


class LocalExchange:
    """All tokens of every sample, and all experts, are here."""

    local = True

    def split(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor, *, seq: int) -> Tensor:
        return x

    def positions(self, given: Tensor | None, x: Tensor) -> Tensor:
        return counted(x.shape[1], x) if given is None else given

    def part(self, per_token: Tensor) -> Tensor:
        return per_token

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        return sums

    def gather_over_sequence(self, keys: Tensor, *, fill: int, seq: int) -> Tensor:
        return keys.flatten()

    def apply(self, rows: Tensor, counts: Tensor, experts: Apply) -> Tensor:
        return experts(rows, counts)


def counted(seq: int, x: Tensor) -> Tensor:
    """The places 0 .. seq - 1 for every sample of `x` `[batch, ...]`."""
    return torch.arange(seq, device=x.device).expand(x.shape[0], seq)


@runtime_checkable
class SendsTokens(Protocol):
    """A module whose tokens reach its experts by `exchange`; `stacked` names its parameters `[experts, ...]`."""

    exchange: TokenExchange

    @property
    def stacked(self) -> Sequence[str]: ...


def through_experts(
    tokens: Tensor,
    chosen: Tensor,
    gates: Tensor,
    *,
    number: int,
    exchange: TokenExchange,
    experts: Apply,
    kept: Tensor | None = None,
) -> Tensor:
    """`tokens` `[m, width]` through the experts that they chose, and the sum weighted by `gates`; as `tokens`.

    `chosen` and `gates` are `[m, top_k]`, of `number` experts in all. A choice that is not `kept` (bool as `chosen`;
    None: all are) goes nowhere and adds nothing.
    """
    goes_to = chosen.flatten() if kept is None else chosen.masked_fill(~kept, number).flatten()
    order = torch.argsort(goes_to, stable=True)
    # `bincount` would have a GPU tell the host how many there are
    counts = goes_to.new_zeros(number + 1).scatter_add_(0, goes_to, torch.ones_like(goes_to))[:number]
    if kept is not None:
        order = order[: int(counts.sum())]
    choices = chosen.shape[-1]
    rows = tokens[:, None].expand(-1, choices, -1).flatten(0, 1)[order]
    done = exchange.apply(rows, counts, experts)
    back = done.new_zeros(len(goes_to), tokens.shape[-1]).index_copy(0, order, done)
    return (back.unflatten(0, (-1, choices)) * gates[..., None]).sum(1)
