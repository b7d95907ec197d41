"""Batch normalisation whose statistics no layout can change.

Batch normalisation ties a sample to whatever shares its batch, hence to the microbatch and the world size. Here the
neighbours are declared: every `group_samples` consecutive samples are normalised by their own mean and variance ("ghost
batches", arXiv:1705.08741), in whichever batch they arrive.

`with_grouped_norm` puts such layers in the place of a user's `torch.nn.BatchNorm` layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.models.step_batch_norm import StepBatchNorm, replace_norms


class GroupedBatchNorm(StepBatchNorm):
    """Normalises `[groups * group_samples, channels, ...]`, each group by its own statistics."""

    def __init__(
        self, channels: int, group_samples: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__(channels, eps=eps, momentum=momentum, affine=affine)
        self.group_samples = group_samples

    def normalised(self, x: Tensor) -> Tensor:
        """Raises `ValueError` for a batch of incomplete groups."""
        groups = x.unflatten(0, (self._groups_in(x), self.group_samples))
        var, mean = torch.var_mean(groups, dim=(1, *range(3, groups.ndim)), correction=0, keepdim=True)
        numel = groups[0, :, 0].numel()
        sums = torch.stack((mean, var * (numel / max(1, numel - 1)))).detach().to(torch.float64).flatten(2).sum(1)
        self.add(sums[0], sums[1], count=mean.shape[0])
        return self.scaled(groups, mean, var, [1] * (x.ndim - 2)).flatten(0, 1)

    def _groups_in(self, x: Tensor) -> int:
        groups, left_over = divmod(x.shape[0], self.group_samples)
        if left_over:
            raise ValueError(
                f"a batch of {x.shape[0]} samples; statistics are taken over groups of {self.group_samples}, so every "
                f"batch of training must hold whole groups: make micro_samples a multiple of {self.group_samples}"
            )
        return groups

    def extra_repr(self) -> str:
        return f"{self.channels}, group_samples={self.group_samples}, eps={self.eps}, momentum={self.momentum}"


def with_grouped_norm(model: nn.Module, group_samples: int) -> None:
    """Puts a `GroupedBatchNorm` in the place of every batch norm of `model` that trains; its parameters stay.

    Raises `UserCodeError` for one that averages over all steps (`momentum=None`).
    """

    def make(norm: _BatchNorm) -> GroupedBatchNorm:
        return GroupedBatchNorm(
            norm.num_features,
            group_samples,
            eps=norm.eps,
            momentum=norm.momentum or 0.0,
            affine=norm.weight is not None,
        )

    replace_norms(model, make)
