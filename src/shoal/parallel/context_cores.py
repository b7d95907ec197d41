"""The cores that a model's attentions get where a rank holds a part of every sequence, and what they send.

Under a mask of `[model.attention]` a rank fetches the blocks of keys and values that its queries see, and no others:

    every rank   its own blocks that others need   --all-to-all-->   those of others that it needs     forward
                 their gradients                   <--all-to-all--                                     backward

Which blocks these are follows from the mask and the length alone, so that no rank has to ask. The bytes
of a window grow with the window, those of a ring with the sequence. Ulysses has whole sequences, and masks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective
from shoal.comm.messages import Messages
from shoal.errors import LayoutError, UserCodeError
from shoal.models.attention_config import SparseAttentionConfig
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import (
    GatheredBlocks,
    SparseAttention,
    attend_blocks,
    gathered_blocks,
    in_blocks,
    kept_blocks,
)
from shoal.parallel.attention_tiles import wide_dtype
from shoal.parallel.context import (
    ContextCore,
    GatheredAttention,
    RingAttention,
    UlyssesAttention,
    gathered,
    in_sequence,
    positions,
)


class Fetch(NamedTuple):
    """Which blocks a rank has for its queries, by their numbers in the sequence: its `own`, then those that come.

    `sent` are places among its own, one destination after the other: `to_each` of them to each rank, and `from_each`
    of the others from each.
    """

    own: list[int]
    coming: list[int]
    sent: list[list[int]]
    from_each: list[int]

    @property
    def to_each(self) -> list[int]:
        """How many blocks go to each rank."""
        return [len(places) for places in self.sent]


def fetch_of(config: SparseAttentionConfig, blocks: int, *, size: int, rank: int) -> Fetch:
    """What `rank` of `size` fetches and sends of sequences of `blocks` blocks, which 2 x `size` divides."""
    owned = [positions(blocks, size=size, rank=each).tolist() for each in range(size)]
    kept = kept_blocks(config, blocks)
    needed = [sorted({block for row in own for block in kept[row]}) for own in owned]
    place = {block: number for number, block in enumerate(owned[rank])}
    home = {block: other for other, own in enumerate(owned) for block in own}
    coming = sorted((block for block in needed[rank] if block not in place), key=lambda block: (home[block], block))
    from_each = [sum(home[block] == other for block in coming) for other in range(size)]
    sent = [[place[block] for block in needed[other] if block in place and other != rank] for other in range(size)]
    return Fetch(owned[rank], coming, sent, from_each)


class FetchedAttention(ContextCore):
    """`ContextCore` under a mask, by the blocks that it keeps."""

    def __init__(self, group: Collective, mask: SparseAttentionConfig) -> None:
        super().__init__(group)
        self.mask = mask
        self._plan: tuple[tuple[int, torch.device], Fetch, GatheredBlocks] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """Raises `LayoutError` where blocks do not divide the chunks of a rank."""
        size = self.mask.block
        fetch, blocks = self._planned(query.shape[2], query.device)
        own = torch.stack([in_blocks(each, size) for each in (key, value)]).movedim(2, 0)
        coming = _Fetched.apply(own.contiguous(), fetch, self.group)
        keys, values = torch.cat((own, coming)).movedim(0, 2)
        return attend_blocks(
            in_blocks(query, size), keys, values, blocks, documents=self._documents(documents, fetch, size)
        )

    def _planned(self, tokens: int, device: torch.device) -> tuple[Fetch, GatheredBlocks]:
        """For so many tokens a rank; the last ones that were asked for are kept."""
        if self._plan is None or self._plan[0] != (tokens, device):
            check_blocks(self.mask, tokens * self.group.size, self.group.size)
            blocks = tokens * self.group.size // self.mask.block
            fetch = fetch_of(self.mask, blocks, size=self.group.size, rank=self.group.rank)
            found = gathered_blocks(self.mask, blocks, fetch.own, device=device)
            places = torch.zeros(blocks, dtype=torch.int64, device=device)
            here = torch.tensor(fetch.own + fetch.coming, device=device)
            places[here] = torch.arange(len(here), device=device)
            self._plan = (tokens, device), fetch, GatheredBlocks(places[found.kept], found.seen)
        return self._plan[1:]

    def _documents(self, documents: Tensor | None, fetch: Fetch, size: int) -> tuple[Tensor, Tensor] | None:
        if documents is None:
            return None
        numbers = in_sequence(gathered(self.group, documents), dim=-1).unflatten(1, (-1, size))
        return numbers[:, fetch.own], numbers[:, fetch.own + fetch.coming]


def check_blocks(config: SparseAttentionConfig, tokens: int, size: int) -> None:
    """Raises `LayoutError` where blocks do not divide the chunks that a rank holds of so many tokens."""
    if tokens % (2 * size * config.block):
        raise LayoutError(
            f"model.attention.block = {config.block} does not divide the two chunks of {tokens // (2 * size)} tokens "
            f"that each of {size} context ranks holds of {tokens}: choose a block that does, or context.kind = "
            '"ulysses"'
        )


class _Fetched(torch.autograd.Function):
    """From this rank's blocks `[n, ...]` to those that come `[m, ...]`; backward, their gradients come home."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, fetch: Fetch, group: Collective) -> Tensor:
        ctx.fetch, ctx.group, ctx.blocks = fetch, group, len(own)
        leaving = own[[place for places in fetch.sent for place in places]]
        return _exchanged(group, leaving, to_each=fetch.to_each, from_each=fetch.from_each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, fetch = grads[0].contiguous(), ctx.fetch
        home = _exchanged(ctx.group, grad, to_each=fetch.from_each, from_each=fetch.to_each)
        total = torch.zeros((ctx.blocks, *grad.shape[1:]), dtype=wide_dtype(grad.dtype), device=grad.device)
        for places, terms in zip(fetch.sent, home.split(fetch.to_each), strict=True):
            total[places] += terms  # a block goes to a rank once
        return total.to(grad.dtype), None, None


def _exchanged(group: Collective, leaving: Tensor, *, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
    arriving = leaving.new_empty((sum(from_each), *leaving.shape[1:]))
    group.all_to_all(arriving, leaving, output_sizes=from_each, input_sizes=to_each).wait()
    return arriving


ContextKind = Literal["ring", "ulysses", "allgather"]

KINDS: Mapping[ContextKind, type[ContextCore]] = MappingProxyType(
    {"ring": RingAttention, "ulysses": UlyssesAttention, "allgather": GatheredAttention}
)


def check_context(model: nn.Module, group: Collective) -> None:
    """Raises `UserCodeError` for a whole model without `CausalAttention`, where `group` has several ranks."""
    if group.size > 1 and not _cores(model):
        raise UserCodeError(
            f"{type(model).__name__} has no module of type shoal.models.layers.CausalAttention, and without one a "
            f"rank sees only its own part of a sequence: compute attention in such a module, or set layout.context=1"
        )


def put_context(model: nn.Module, group: Collective, kind: ContextKind, messages: Messages | None = None) -> None:
    """Replaces every `CausalAttention` of `model` by the kind's, over the context ranks of `group`, and every
    `SparseAttention` by one under its mask. `messages`: what a ring sends over, None: the group.

    From then on the model is called with this rank's slices of the sequence and with its `positions` (see `shard`).
    Call it before `recompute`. A group of one rank changes nothing, and neither does a stage without attention.
    Raises `UserCodeError` for a module that is recomputed already.
    """
    if group.size == 1:
        return
    for name, module in _cores(model).items():
        if "forward" in vars(module):
            raise UserCodeError(f"'{name}' already has a forward of its own: split the context before recompute")
        model.set_submodule(name, _core(module, kind, messages)(group))


def _core(module: CausalAttention, kind: ContextKind, messages: Messages | None) -> Callable[[Collective], ContextCore]:
    if not isinstance(module, SparseAttention):
        return partial(RingAttention, messages=messages) if kind == "ring" else KINDS[kind]
    return partial(UlyssesAttention if kind == "ulysses" else FetchedAttention, mask=module.config)


def _cores(model: nn.Module) -> dict[str, CausalAttention]:
    named = model.named_modules(remove_duplicate=False)
    return {name: m for name, m in named if type(m) is CausalAttention or type(m) is SparseAttention}
