"""The attention core of a context rank: as `CausalAttention`, over a part of each sequence.

A core gets this rank's slices of query, key and value, in the order of `shard`, and returns its slice of the result.
The ranks of `group` call it together, forward and backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.models.attention import CausalAttention
from shoal.parallel.context.shard import check_sequence


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
