"""Which tokens of a sequence a context rank holds.

The causal mask gives late tokens more work than early ones. A sequence of n tokens is therefore cut into 2 C chunks,
and rank i of C holds the chunks i and 2 C - 1 - i, in this order: the work of the two adds up to the same on every
rank (arXiv:2407.21783, section 3.3.2). All kinds of context parallelism use this one order.

The attention core of a context rank: as `CausalAttention`, over a part of each sequence.

A core gets this rank's slices of query, key and value, in the order of `shard`, and returns its slice of the result.
The ranks of `group` call it together, forward and backward.

What context ranks send each other: a shift round the ring, and the document numbers of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.errors import LayoutError
from shoal.models.layers import CausalAttention
from shoal.topology.refusal import nearest_multiples


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


def shift(group: Collective, tensor: Tensor, *, tag: int) -> Shift:
    """Begins to send `tensor`, contiguous and not to be written until `wait`, to the next rank of the ring.

    Even ranks call send first and odd ranks receive first: a backend that runs the calls of a pair in their order, as
    NCCL does, would stand still if both began with the same.
    """
    arriving = torch.empty_like(tensor)
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank % 2 == 0:
        sent = group.send(tensor, to=to, tag=tag)
        return Shift(tensor, arriving, (sent, group.recv(arriving, source=source, tag=tag)))
    received = group.recv(arriving, source=source, tag=tag)
    return Shift(tensor, arriving, (received, group.send(tensor, to=to, tag=tag)))


def gathered(group: Collective, tensor: Tensor) -> Tensor:
    """`[size, ...]`: every rank's `tensor`."""
    tensor = tensor.contiguous()
    output = torch.empty((group.size * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    group.all_gather(output, tensor).wait()
    return output.unflatten(0, (group.size, -1))


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


def slice_sequence(tensor: Tensor, places: Tensor, *, dim: int = 1) -> Tensor:
    """The slices of `tensor` `[..., tokens, ...]` at `places`, a rank's `positions`, along `dim`."""
    return tensor.index_select(dim, places.to(tensor.device))


def in_sequence(by_rank: Sequence[Tensor] | Tensor, *, dim: int) -> Tensor:
    """What all ranks hold, rank 0 first, put together in the order of the sequence along `dim`."""
    early, late = zip(*(part.chunk(2, dim) for part in by_rank), strict=True)
    return torch.cat((*early, *reversed(late)), dim)


def by_rank(whole: Tensor, *, size: int, dim: int) -> Tensor:
    """The inverse of `in_sequence`: `[size, ...]`, the part of each rank."""
    chunks = whole.chunk(2 * size, dim)
    return torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), dim) for rank in range(size)])


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
