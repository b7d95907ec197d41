"""Experts: feed-forward layers of one shape, their weights stacked `[experts, outputs, inputs]`.

Tokens arrive sorted by expert, so each expert multiplies one contiguous slice: a grouped matrix product.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNED_FEATURES = 8
"""Rows of bfloat16 begin at 16 bytes in the fused product."""


class Experts(nn.Module):
    """The feed-forward of `shoal.models.feed_forward`, `number` times over. `gate` is None for plain GELU."""

    gate: nn.Parameter | None

    def __init__(self, number: int, *, width: int, hidden: int, feed_forward: Literal["swiglu", "gelu"]) -> None:
        super().__init__()
        gated = feed_forward == "swiglu"
        self.register_parameter("gate", nn.Parameter(torch.zeros(number, hidden, width)) if gated else None)
        self.up = nn.Parameter(torch.zeros(number, hidden, width))
        self.down = nn.Parameter(torch.zeros(number, width, hidden))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """`rows` `[m, width]` sorted by expert, `counts` int64 `[experts]` of them for each; as `rows`."""
        up = grouped_linear(rows, self.up, counts)
        hidden = F.gelu(up) if self.gate is None else F.silu(grouped_linear(rows, self.gate, counts)) * up
        return grouped_linear(hidden, self.down, counts)


def grouped_linear(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`rows` `[m, inputs]` times `weights[g].T` for the `counts[g]` rows of each group g in turn; `[m, outputs]`.

    An expert without rows takes part all the same, so that every weight has a gradient.
    """
    if _fused(rows, weights):
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows, weights.to(rows.dtype).transpose(-2, -1), offs=offsets)
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weights.unbind(0), strict=True)])


def _fused(rows: Tensor, weights: Tensor) -> bool:
    """Is there one kernel for all groups? It takes bfloat16 on GPUs, and rows that are aligned."""
    aligned = all(features % ALIGNED_FEATURES == 0 for features in weights.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and len(rows) > 0
