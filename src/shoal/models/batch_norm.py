"""Batch normalisation over declared groups of samples, and over a microbatch of all ranks (`model.batch_norm`).

Groups: statistics that no layout can change.

Batch normalisation ties a sample to whatever shares its batch, hence to the microbatch and the world size. Here the
neighbours are declared: every `group_samples` consecutive samples are normalised by their own mean and variance ("ghost
batches", arXiv:1705.08741), in whichever batch they arrive.

`with_grouped_norm` puts such layers in the place of a user's `torch.nn.BatchNorm` layers.

Synchronised: by the statistics of a microbatch over all ranks that hold other samples of it.

What `torch.nn.SyncBatchNorm` computes, on CPU tensors too, with uneven numbers of samples, and without samples that
only make microbatches alike. Each rank takes its own count, mean and sum of squared distances from that mean; the ranks
tell each other, and each combines them (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for
Computing Sample Variances", 1979), in float64 and in the order of ranks, so that all have the same bits:

    n = sum n_r        m = sum n_r m_r / n        v = sum (M_r + n_r (m_r - m)^2) / n

Distances are from a mean at all times: E[x^2] - E[x]^2 would lose the variance of a channel whose mean is large. The
exchange is differentiable, so that the gradient of a sample comes from all samples that it was normalised with.

Running statistics move once a step (`StepBatchNorm`), by the mean of the microbatches' statistics. Every rank adds the
same ones, so that the sum over ranks has the same mean.
"""

from __future__ import annotations

from collections.abc import Callable

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


Exchange = Callable[[Tensor], Tensor]
"""From this rank's row, float64 `[n]`, to those of all ranks `[ranks, n]`, with gradients; all ranks call it."""


def alone(row: Tensor) -> Tensor:
    """The exchange of one process."""
    return row[None]


class SynchronisedBatchNorm(StepBatchNorm):
    """Normalises `[samples, channels, ...]` by the statistics of the samples of all ranks that `exchange` reaches.

    `real` says which of this rank's samples of the microbatch at hand count, bool `[samples]`; None: all of them. The
    others are normalised with the same statistics, and are no part of them.
    """

    exchange: Exchange
    real: Tensor | None

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__(channels, eps=eps, momentum=momentum, affine=affine)
        self.exchange, self.real = alone, None

    def normalised(self, x: Tensor) -> Tensor:
        """Raises `ValueError` where samples are left out and `x` has not one row for each sample."""
        ranks = self.exchange(self._own(x))
        counts, (means, squares) = ranks[:, :1], ranks[:, 1:].chunk(2, dim=1)
        count = counts.sum().detach()
        mean = (counts * means).sum(0) / count.clamp(min=1)
        square = (squares + counts * (means - mean).square()).sum(0)
        some = (count > 0).to(torch.float64)
        unbiased = square.detach() / (count - 1).clamp(min=1)
        self.add(mean.detach() * some, unbiased * some, count=some)
        places = [1] * (x.ndim - 2)
        mean, var = (t.to(x.dtype).view(-1, *places) for t in (mean, square / count.clamp(min=1)))
        return self.scaled(x, mean, var, places)

    def _own(self, x: Tensor) -> Tensor:
        """float64 `[1 + 2 * channels]`: numbers in each channel, their means, and the squared distances from these."""
        dims, real = (0, *range(2, x.ndim)), self.real
        numel = x[0, 0].numel()
        if real is None:
            var, mean = torch.var_mean(x, dim=dims, correction=0)
            count = torch.full((1,), float(numel * len(x)), dtype=torch.float64, device=x.device)
            return torch.cat((count, mean.double(), var.double() * count))
        if len(real) != len(x):
            raise ValueError(
                f"a batch norm got {len(x)} rows for a microbatch of {len(real)} samples, of which {int(real.sum())} "
                "count: which rows count is not known. Give it one row for each sample, or choose "
                "batch.global_samples as a multiple of the number of ranks and of batch.micro_samples"
            )
        mask = real.view(-1, *[1] * (x.ndim - 1))
        count = (real.sum() * numel).double().view(1)
        mean = torch.where(mask, x, 0).sum(dims, keepdim=True) / count.clamp(min=1).to(x.dtype)
        squares = torch.where(mask, x - mean, 0).square().sum(dims)
        return torch.cat((count, mean.flatten().double(), squares.double()))

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}"


def with_synchronised_norm(model: nn.Module) -> None:
    """Puts a `SynchronisedBatchNorm` in the place of every batch norm of `model` that trains; its parameters stay.

    Raises `UserCodeError` for one that averages over all steps (`momentum=None`).
    """

    def make(norm: _BatchNorm) -> SynchronisedBatchNorm:
        momentum, affine = norm.momentum or 0.0, norm.weight is not None
        return SynchronisedBatchNorm(norm.num_features, eps=norm.eps, momentum=momentum, affine=affine)

    replace_norms(model, make)
