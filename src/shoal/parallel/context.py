"""Context parallelism: which tokens a rank holds, and how queries meet the keys of others (all-gather, ring,
Ulysses; those that a mask needs: `shoal.parallel.context_cores`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective, Handle
from shoal.comm.messages import Messages
from shoal.errors import LayoutError
from shoal.models.attention_config import SparseAttentionConfig
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import WholeSequences
from shoal.parallel.attention_tiles import Documents, Rows, RowsBackward, tiles_of_sequence, tiles_of_source, wide_dtype
from shoal.topology.refusal import nearest_divisors, nearest_multiples

# What context ranks send each other: a shift round the ring, and the document numbers of all.


@dataclass(frozen=True)
class Shift:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    leaving: Tensor  # kept until it has left
    arriving: Tensor
    handles: tuple[Handle, Handle]

    def wait(self) -> Tensor:
        """What has arrived."""
        for handle in self.handles:
            handle.wait()
        return self.arriving


@dataclass(frozen=True)
class Ring:
    """The ranks of `group`, each of which sends to the next. `messages`: over what, None: over the group."""

    group: Collective
    messages: Messages | None = None

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def shift(self, tensor: Tensor, *, tag: int) -> Shift:
        """Begins to send `tensor`, contiguous and not to be written until `wait`, to the next rank of the ring.

        Even ranks call send first and odd ranks receive first: a backend that runs the calls of a group in their order
        would stand still if all began with the same.
        """
        arriving, messages = torch.empty_like(tensor), self.messages or self.group
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.rank % 2 == 0:
            sent = messages.send(tensor, to=to, tag=tag)
            return Shift(tensor, arriving, (sent, messages.recv(arriving, source=source, tag=tag)))
        received = messages.recv(arriving, source=source, tag=tag)
        return Shift(tensor, arriving, (received, messages.send(tensor, to=to, tag=tag)))


def pairs_of_ring(size: int) -> list[tuple[int, int]]:
    """Sender and receiver of all that the ranks of a ring send."""
    return [(rank, (rank + 1) % size) for rank in range(size)]


def gathered(group: Collective, tensor: Tensor) -> Tensor:
    """`[size, ...]`: every rank's `tensor`."""
    tensor = tensor.contiguous()
    output = torch.empty((group.size * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    group.all_gather(output, tensor).wait()
    return output.unflatten(0, (group.size, -1))


# Which tokens of a sequence a context rank holds.
#
# The causal mask gives late tokens more work than early ones. A sequence of n tokens is therefore cut into 2 C chunks,
# and rank i of C holds the chunks i and 2 C - 1 - i, in this order: the work of the two adds up to the same on every
# rank (arXiv:2407.21783, section 3.3.2). All kinds of context parallelism use this one order.


def check_sequence(tokens: int, size: int) -> None:
    """Raises `LayoutError` unless `size` context ranks can hold two equal chunks of `tokens` each."""
    if size > 1 and (tokens % (2 * size) or tokens == 0):
        fitting = " or ".join(f"sequence={n}" for n in nearest_multiples(2 * size, tokens))
        raise LayoutError(
            f"sequence={tokens} cannot be split by context={size}: each rank holds two chunks of equal length, so the "
            f"sequence must be a multiple of 2 x context = {2 * size}; nearest: {fitting}"
        )


def positions(tokens: int, *, size: int, rank: int) -> Tensor:
    """The places in their sequence, int64 `[tokens / size]`, ascending, of what `rank` of `size` ranks holds.

    Raises `LayoutError` where the sequence cannot be split.
    """
    check_sequence(tokens, size)
    if size == 1:
        return torch.arange(tokens)
    chunk = tokens // (2 * size)
    late = 2 * size - 1 - rank
    return torch.cat((torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(late * chunk, (late + 1) * chunk)))


def in_sequence(by_rank: Sequence[Tensor] | Tensor, *, dim: int) -> Tensor:
    """What all ranks hold, rank 0 first, put together in the order of the sequence along `dim`."""
    early, late = zip(*(part.chunk(2, dim) for part in by_rank), strict=True)
    return torch.cat((*early, *reversed(late)), dim)


def by_rank(whole: Tensor, *, size: int, dim: int) -> Tensor:
    """The inverse of `in_sequence`: `[size, ...]`, the part of each rank."""
    chunks = whole.chunk(2 * size, dim)
    return torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), dim) for rank in range(size)])


# The attention core of a context rank: as `CausalAttention`, over a part of each sequence.
#
# A core gets this rank's slices of query, key and value, in the order of `shard`, and returns its slice of the result.
# The ranks of `group` call it together, forward and backward.


class ContextCore(CausalAttention, ABC):
    """Base of the kinds."""

    def __init__(self, group: Collective) -> None:
        super().__init__()
        self.group = group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
        """`query` `[batch, heads, seq / size, head_size]`, `key` and `value` with `kv_heads`; as `query`.

        `documents` `[batch, seq / size]` are integers. All ranks pass some, or none does.
        Raises `LayoutError` where the sequence has no two equal chunks for each rank.
        """
        check_sequence(query.shape[2] * self.group.size, self.group.size)
        device = query.device.type
        if torch.is_autocast_enabled(device):  # as for scaled_dot_product_attention
            half = torch.get_autocast_dtype(device)
            query, key, value = query.to(half), key.to(half), value.to(half)
        with torch.autocast(device, enabled=False):
            return self.attend(query, key, value, documents)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        """What each kind does in its own way; as `forward`, without autocast."""

    def extra_repr(self) -> str:
        return f"rank {self.group.rank} of {self.group.size}"


# Attention over gathered keys and values (Llama 3, arXiv:2407.21783, section 3.3.2).
#
# Each rank gathers the keys and values of the whole sequence, which grouped-query heads make small beside the queries,
# and computes its own rows. The backward gathers them again, so that none is kept, and reduce-scatters their gradients.


SEQUENCE = -2
"""The dimension of `[..., seq, head_size]` that is split."""


class GatheredAttention(ContextCore):
    """`ContextCore` by an all-gather."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        all_documents = None if documents is None else in_sequence(gathered(self.group, documents), dim=-1)
        return _Gathered.apply(query, key, value, documents, all_documents, self.group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        all_documents: Tensor | None,
        group: Collective,
    ) -> Tensor:
        rows, (keys, values) = Rows(query), _whole(group, key, value)
        for tile in tiles_of_sequence(group.rank, size=group.size, length=query.shape[2]):
            rows.add(tile, keys, values, documents=_documents(documents, all_documents))
        ctx.group, out = group, rows.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, documents, all_documents, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, documents, all_documents, out, lse = ctx.saved_tensors
        group, rows = ctx.group, RowsBackward(grads[0], query, out=out, lse=lse)
        both = _whole(group, key, value)
        of_both = torch.zeros(both.shape, dtype=wide_dtype(both.dtype), device=both.device)
        with torch.autocast(query.device.type, enabled=False):
            for tile in tiles_of_sequence(group.rank, size=group.size, length=query.shape[2]):
                rows.add(
                    tile, both[0], both[1], documents=_documents(documents, all_documents),
                    grad_key=of_both[0], grad_value=of_both[1],
                )  # fmt: skip
        own = _own_sum(group, of_both)
        return (rows.grad_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), None, None, None)


def _whole(group: Collective, key: Tensor, value: Tensor) -> Tensor:
    """`[2, batch, kv_heads, seq, head_size]`: the keys and the values of the whole sequence, in its order."""
    return in_sequence(gathered(group, torch.stack((key, value))), dim=SEQUENCE)


def _own_sum(group: Collective, whole: Tensor) -> Tensor:
    """This rank's part of the sum of all ranks' `whole`; the adjoint of `_whole`."""
    parts = by_rank(whole, size=group.size, dim=SEQUENCE)
    own = torch.empty_like(parts[0])
    group.reduce_scatter(own, parts.flatten(0, 1)).wait()
    return own


def _documents(documents: Tensor | None, all_documents: Tensor | None) -> Documents | None:
    return None if documents is None or all_documents is None else Documents(documents, all_documents)


# Ring attention (Liu, Zaharia and Abbeel, arXiv:2310.01889), balanced for the causal mask.
#
# Keys and values travel round the ring while each rank computes with those that it has; what comes out is merged by the
# log-sum-exp. In the backward they travel again, and their gradients one step behind them: the sum of a block begins at
# the rank after its home, gains a term at every rank, and is home after size - 1 steps. Only this rank's slices and its
# log-sum-exp are kept in between.


BLOCKS, GRADIENTS = 0, 1
"""Tags of the two things that travel."""


class RingAttention(ContextCore):
    """`ContextCore` by a ring."""

    def __init__(self, group: Collective, messages: Messages | None = None) -> None:
        super().__init__(group)
        self._ring = Ring(group, messages)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        everyones = None if documents is None else gathered(self.group, documents)
        return _Ring.apply(query, key, value, everyones, self._ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, everyones: Tensor | None, ring: Ring) -> Tensor:
        rows, block = Rows(query), torch.stack((key, value))
        for source in _sources(ring):
            coming = None if source == _last(ring) else ring.shift(block, tag=BLOCKS)
            documents = _ring_documents(everyones, ring.rank, source)
            for tile in tiles_of_source(ring.rank, source, length=query.shape[2]):
                rows.add(tile, block[0], block[1], documents=documents)
            block = block if coming is None else coming.wait()
        ctx.ring, out = ring, rows.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, everyones, out, rows.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, everyones, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            rows = RowsBackward(grads[0], query, out=out, lse=lse)
            of_block = _block_gradient(rows, torch.stack((key, value)), everyones, ctx.ring)
        return rows.grad_query.to(query.dtype), of_block[0].to(key.dtype), of_block[1].to(value.dtype), None, None


def _block_gradient(rows: RowsBackward, block: Tensor, everyones: Tensor | None, ring: Ring) -> Tensor:
    """The gradient of this rank's `block` of keys and values, all ranks' terms; adds to `rows` on the way."""
    own = torch.zeros(block.shape, dtype=wide_dtype(block.dtype), device=block.device)
    travelling = None
    for source in _sources(ring):
        coming = None if source == _last(ring) else ring.shift(block, tag=BLOCKS)
        terms = own if source == ring.rank else torch.zeros_like(own)
        documents = _ring_documents(everyones, ring.rank, source)
        for tile in tiles_of_source(ring.rank, source, length=rows.query.shape[2]):
            rows.add(tile, block[0], block[1], documents=documents, grad_key=terms[0], grad_value=terms[1])
        if source != ring.rank:
            if travelling is not None:
                terms += travelling.wait()
            travelling = ring.shift(terms, tag=GRADIENTS)
        block = block if coming is None else coming.wait()
    return own if travelling is None else own + travelling.wait()


def _sources(ring: Ring) -> list[int]:
    """Whose block is here, step by step."""
    return [(ring.rank - step) % ring.size for step in range(ring.size)]


def _last(ring: Ring) -> int:
    return _sources(ring)[-1]


def _ring_documents(everyones: Tensor | None, rank: int, source: int) -> Documents | None:
    return None if everyones is None else Documents(everyones[rank], everyones[source])


# Attention by exchanging heads for sequence (DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509).
#
#     [batch, heads, seq / size, head_size]  --all-to-all-->  [batch, heads / size, seq, head_size]
#
# In between each rank has whole sequences of some heads, and attention is the ordinary one. Key and value heads that
# are too few for the ranks are sent to each rank that needs them; the gradients of the copies add up.


class UlyssesAttention(ContextCore):
    """`ContextCore` by two all-to-alls. `mask`: which tokens a token sees; None: all before it."""

    def __init__(self, group: Collective, mask: SparseAttentionConfig | None = None) -> None:
        super().__init__(group)
        self._whole = CausalAttention().forward if mask is None else WholeSequences(mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        size, heads, kv_heads = self.group.size, query.shape[1], key.shape[1]
        check_heads(heads, size)
        copies = kv_copies(kv_heads, size)
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        parts = torch.cat([x.unflatten(1, (size, -1)) for x in (query, key, value)], dim=2).movedim(1, 0)
        whole = in_sequence(_Exchange.apply(parts, self.group), dim=SEQUENCE)
        own = (heads // size, kv_heads * copies // size, kv_heads * copies // size)
        all_documents = None if documents is None else in_sequence(gathered(self.group, documents), dim=-1)
        query, key, value = whole.split(own, dim=1)
        out = self._whole(query, key, value, all_documents)
        return _Exchange.apply(by_rank(out, size=size, dim=SEQUENCE), self.group).movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Part i of `[size, ...]` goes to rank i, part j comes from rank j; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return _exchanged(group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(ctx.group, grads[0]), None


def _exchanged(group: Collective, parts: Tensor) -> Tensor:
    parts = parts.contiguous()
    output = torch.empty_like(parts)
    group.all_to_all(output, parts).wait()
    return output


def kv_copies(kv_heads: int, size: int) -> int:
    """How often each key and value head is sent, so that every rank has those of its query heads."""
    return size // math.gcd(kv_heads, size)


def check_heads(heads: int, size: int) -> None:
    """Raises `LayoutError` unless `size` ranks can each take as many of the query heads, those of a tensor rank."""
    if heads % size:
        fitting = " or ".join(f"context={n}" for n in nearest_divisors(heads, size))
        raise LayoutError(
            f"context={size} with kind 'ulysses' does not divide the {heads} query heads of a rank, which it exchanges "
            f"for parts of the sequence; nearest: {fitting}, or another kind"
        )
