"""Batch normalisation whose statistics no layout can change, and the protocol by which a step agrees on statistics.

Batch normalisation (Ioffe and Szegedy, arXiv:1502.03167) ties a sample to whatever shares its batch, hence to the
microbatch and the world size. Here the neighbours are declared: every `group_samples` consecutive samples are
normalised by their own mean and variance ("ghost batches", arXiv:1705.08741), in whichever batch they arrive.

Running statistics are a part of the step, not of the forward: a step that is skipped must leave none, a step that is
accumulated must count once, and every replica must end with the same. So a layer only adds up what it sees, and the
engine commits the sum over all replicas once a step (`StepStatistics`):

    forward, forward, ...                          each adds to the layer's sums
    total = all_reduce(layer.step_sums())          over the replicas
    layer.commit_sums(total)                       or layer.discard_sums() when the step is skipped

With `count` groups over all replicas, whose means and unbiased variances were added up,

    running <- (1 - momentum) running + momentum sum / count

`with_grouped_norm` puts such layers in the place of a user's `torch.nn.BatchNorm` layers.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import UserCodeError


@runtime_checkable
class StepStatistics(Protocol):
    """A module with statistics that are agreed once a step."""

    def step_sums(self) -> Tensor:
        """What was gathered since the last commit or discard, to be summed: float64, flat, of a fixed length."""
        ...

    def commit_sums(self, total: Tensor) -> None:
        """Takes `total`, the sum of all replicas' `step_sums()`, into the model's buffers, and starts anew."""
        ...

    def discard_sums(self) -> None:
        """Starts anew without a trace of what was gathered."""
        ...


class GroupedBatchNorm(nn.Module):
    """Normalises `[groups * group_samples, channels, ...]`; a `StepStatistics`.

    Statistics are computed in float32 at least. `eval()` uses the running statistics, as of the last commit.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    totals: Tensor

    def __init__(
        self, channels: int, group_samples: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__()
        self.channels, self.group_samples, self.eps, self.momentum = channels, group_samples, eps, momentum
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("totals", torch.zeros(1 + 2 * channels, dtype=torch.float64), persistent=False)

    def reset_buffers(self) -> None:
        """The state before the first step."""
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.totals.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the shape and type of `x`. Raises `ValueError` in training for a batch of incomplete groups."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        places = [1] * (x.ndim - 2)
        if not self.training:
            mean, var = (running.view(-1, *places) for running in (self.running_mean, self.running_var))
            return self._scaled(wide, mean, var, places).to(x.dtype)
        groups = wide.unflatten(0, (self._groups_in(x), self.group_samples))
        var, mean = torch.var_mean(groups, dim=(1, *range(3, groups.ndim)), correction=0, keepdim=True)
        self._gather(mean, var, numel=groups[0, :, 0].numel())
        return self._scaled(groups, mean, var, places).flatten(0, 1).to(x.dtype)

    def step_sums(self) -> Tensor:
        """float64 `[1 + 2 * channels]`: the number of groups, the sum of their means, of their unbiased variances."""
        return self.totals.clone()

    @torch.no_grad()
    def commit_sums(self, total: Tensor) -> None:
        """One step of the running statistics; a total of no groups leaves them as they are."""
        count, sums = total[0], total[1:].view(2, self.channels)
        step = self.momentum * (count > 0).to(total.dtype)
        for running, mean in zip((self.running_mean, self.running_var), sums / count.clamp(min=1), strict=True):
            running.add_(step * (mean - running))
        self.discard_sums()

    def discard_sums(self) -> None:
        """Forgets what was gathered since the last commit."""
        self.totals.zero_()

    def _scaled(self, x: Tensor, mean: Tensor, var: Tensor, places: list[int]) -> Tensor:
        scale = torch.rsqrt(var + self.eps)
        if self.weight is None or self.bias is None:
            return (x - mean) * scale
        return (x - mean) * (self.weight.view(-1, *places) * scale) + self.bias.view(-1, *places)

    @torch.no_grad()
    def _gather(self, mean: Tensor, var: Tensor, *, numel: int) -> None:
        """Adds the groups. A recomputed forward adds them twice, and their number too: the averages stay the same."""
        unbiased = var * (numel / max(1, numel - 1))
        sums = torch.stack((mean, unbiased)).to(torch.float64).flatten(2).sum(1).flatten()
        self.totals += torch.cat((sums.new_full((1,), mean.shape[0]), sums))

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
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _BatchNorm) and module.training and name:
            model.set_submodule(name, _grouped(module, name, group_samples))


def _grouped(norm: _BatchNorm, name: str, group_samples: int) -> GroupedBatchNorm:
    if norm.momentum is None:
        raise UserCodeError(
            f"module {name} ({type(norm).__name__}) averages its statistics over all steps (momentum=None), which "
            "statistics over groups do not: give it a momentum, such as 0.1"
        )
    made = GroupedBatchNorm(
        norm.num_features, group_samples, eps=norm.eps, momentum=norm.momentum, affine=norm.weight is not None
    )
    if norm.weight is not None:
        made.weight, made.bias = norm.weight, norm.bias
    if norm.running_mean is not None and norm.running_var is not None:
        made.running_mean.copy_(norm.running_mean)
        made.running_var.copy_(norm.running_var)
    return made
