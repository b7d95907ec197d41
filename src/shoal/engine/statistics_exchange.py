"""The exchange of `SynchronisedBatchNorm` between ranks: rows of statistics, with gradients of any order.

    rows = [row_0; row_1; ...],    dL/drow_r = sum over ranks q of (dL_q/drows)[r]

The forward is an all-gather, the backward a reduce-scatter, and the backward of that an all-gather again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.models.batch_norm import SynchronisedBatchNorm


def synchronised_norms(model: nn.Module) -> list[SynchronisedBatchNorm]:
    """Those of `model`, in its order."""
    return [module for module in model.modules() if isinstance(module, SynchronisedBatchNorm)]


def connect_norms(model: nn.Module, group: Collective) -> None:
    """From now on they take their statistics over the ranks of `group`, all of which call them in the same order."""

    def exchange(row: Tensor) -> Tensor:
        return _Rows.apply(row, group)

    for norm in synchronised_norms(model):
        norm.exchange = exchange


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        rows = row.new_empty(group.size, *row.shape)
        group.all_gather(rows.flatten(), row.contiguous()).wait()
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        own = torch.empty_like(rows[0])
        group.reduce_scatter(own, rows.contiguous().flatten()).wait()
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Rows.apply(gradients[0], ctx.group), None
