"""Layers of which each rank of a group has a part, by the names that the whole layers' parameters have."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.tensor.cut import Cut

Crossing = Callable[[Tensor], Tensor]
"""An operator of `shoal.parallel.tensor.operators`, its group given."""


class Entrance:
    """How the column layers of one module take their input: crossed once for all that get the same tensor.

    It keeps a tensor until as many layers as share it have had it, so that nothing lives longer than the forward.
    """

    def __init__(self, crossing: Crossing, layers: int) -> None:
        self._crossing, self._layers = crossing, layers
        self._kept: tuple[Tensor, bool, Tensor] | None = None
        self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        recording = torch.is_grad_enabled()
        if self._kept is None or self._kept[0] is not x or self._kept[1] != recording:
            self._kept, self._left = (x, recording, self._crossing(x)), self._layers
        inside = self._kept[2]
        self._left -= 1
        if self._left == 0:
            self._kept = None
        return inside


class ColumnLinear(nn.Module):
    """The features `[..., in]` to this rank's part of the outputs: rows of the weight, and the bias of those rows."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, entrance: Crossing) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.entrance = entrance
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.entrance(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's part of the features to all outputs: columns of the weight; the bias is added once, to the sum."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, leave: Crossing) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.leave = leave
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        total = self.leave(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias.to(total.dtype)


class VocabularyEmbedding(nn.Module):
    """Tokens `[batch, seq]` to vectors `[batch, seq, width]`: each rank looks up its own rows, and the sum has all."""

    def __init__(self, weight: nn.Parameter, cut: Cut, *, total: int, padding: int | None, leave: Crossing) -> None:
        super().__init__()
        self.weight, self.cut, self.total, self.leave = weight, cut, total, leave
        self.padding = padding - cut.offset if padding is not None and self._holds(padding) else None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.leave(self._own_rows(tokens))

    def _own_rows(self, tokens: Tensor) -> Tensor:
        if self.cut.length == 0:  # still part of the graph, so that this rank takes part in every collective
            return self.weight.sum() + self.weight.new_zeros(*tokens.shape, self.weight.shape[1])
        before, end = self.cut.offset, self.cut.offset + self.cut.length
        others = ((tokens >= 0) & (tokens < before)) | ((tokens >= end) & (tokens < self.total))
        # A token outside the whole vocabulary stays outside here, and fails as it does in the unsplit layer.
        rows = F.embedding((tokens - before).masked_fill(others, 0), self.weight, padding_idx=self.padding)
        return rows.masked_fill(others[..., None], 0)

    def _holds(self, token: int) -> bool:
        return self.cut.offset <= token < self.cut.offset + self.cut.length
