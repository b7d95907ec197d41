"""Which tokens of a sequence a context rank holds, and the base of the attention cores that meet the keys of others.

The causal mask gives late tokens more work than early ones. A sequence of n tokens is therefore cut into 2 C chunks,
and rank i of C holds the chunks i and 2 C - 1 - i, in this order: the work of the two adds up to the same on every
rank (arXiv:2407.21783, section 3.3.2). All kinds of context parallelism use this one order, that of `positions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.errors import LayoutError
from shoal.models.layers import CausalAttention
from shoal.topology.refusal import nearest_multiples

SEQUENCE = -2
"""The dimension of `[..., seq, head_size]` that is split."""


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


def gathered(group: Collective, tensor: Tensor) -> Tensor:
    """`[size, ...]`: every rank's `tensor`."""
    tensor = tensor.contiguous()
    output = torch.empty((group.size * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    group.all_gather(output, tensor).wait()
    return output.unflatten(0, (group.size, -1))


class ContextCore(CausalAttention, ABC):
    """Base of the kinds: `CausalAttention` over a part of each sequence.

    A core gets this rank's slices of query, key and value, in the order of `positions`, and returns its slice of the
    result. The ranks of `group` call it together, forward and backward.
    """

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
