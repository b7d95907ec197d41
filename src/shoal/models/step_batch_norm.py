"""What batch normalisations have in common whose running statistics move once a step, whatever the step's microbatches.

Batch normalisation (Ioffe and Szegedy, arXiv:1502.03167) over some set of samples with mean m and variance v:

    y = (x - m) / sqrt(v + eps) * weight + bias

Which samples make a set is the subclass's. Running statistics are a part of the step, not of the forward: a step that
is skipped must leave none, a step that is accumulated must count once, and every replica must end with the same. So a
layer only adds up what it sees, and the engine commits the sum over all replicas once a step (`StepStatistics`):

    forward, forward, ...                          each adds to the layer's sums
    total = all_reduce(layer.step_sums())          over the replicas
    layer.commit_sums(total)                       or layer.discard_sums() when the step is skipped

With `count` sets over all replicas, whose means and unbiased variances were added up,

    running <- (1 - momentum) running + momentum sum / count
"""

from __future__ import annotations

from collections.abc import Callable
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


class StepBatchNorm(nn.Module):
    """Normalises `[samples, channels, ...]` in training by statistics that a subclass takes; a `StepStatistics`.

    Statistics are computed in float32 at least. `eval()` uses the running statistics, as of the last commit.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    totals: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum = channels, eps, momentum
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
        """Returns the shape and type of `x`. In training it raises what `normalised` does."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            return self.normalised(wide).to(x.dtype)
        places = [1] * (x.ndim - 2)
        mean, var = (running.view(-1, *places) for running in (self.running_mean, self.running_var))
        return self.scaled(wide, mean, var, places).to(x.dtype)

    def normalised(self, x: Tensor) -> Tensor:
        """The subclass's part, in training: `x` in float32 or float64, normalised, in its shape; calls `add`."""
        raise NotImplementedError

    def step_sums(self) -> Tensor:
        """float64 `[1 + 2 * channels]`: the number of sets, the sum of their means, of their unbiased variances."""
        return self.totals.clone()

    @torch.no_grad()
    def commit_sums(self, total: Tensor) -> None:
        """One step of the running statistics; a total of no sets leaves them as they are."""
        count, sums = total[0], total[1:].view(2, self.channels)
        step = self.momentum * (count > 0).to(total.dtype)
        for running, mean in zip((self.running_mean, self.running_var), sums / count.clamp(min=1), strict=True):
            running.add_(step * (mean - running))
        self.discard_sums()

    def discard_sums(self) -> None:
        """Forgets what was gathered since the last commit."""
        self.totals.zero_()

    def scaled(self, x: Tensor, mean: Tensor, var: Tensor, places: list[int]) -> Tensor:
        """`x` normalised by `mean` and `var`, which have a shape that goes with it; `places`: a 1 for each dim of `x`
        behind the channels.
        """
        scale = torch.rsqrt(var + self.eps)
        if self.weight is None or self.bias is None:
            return (x - mean) * scale
        return (x - mean) * (self.weight.view(-1, *places) * scale) + self.bias.view(-1, *places)

    @torch.no_grad()
    def add(self, mean: Tensor, unbiased: Tensor, *, count: int | Tensor) -> None:
        """Adds `count` sets, with the sums of their means and of their unbiased variances, both `[channels]`.

        A recomputed forward adds its sets twice, and their number too: the averages stay the same.
        """
        sums = torch.cat((mean, unbiased)).to(torch.float64)
        self.totals += torch.cat((sums.new_ones(1) * count, sums))


def replace_norms(model: nn.Module, make: Callable[[_BatchNorm], StepBatchNorm]) -> None:
    """Puts what `make` makes into the place of every batch norm of `model` that trains; parameters and buffers stay.

    Raises `UserCodeError` for one that averages over all steps (`momentum=None`).
    """
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _BatchNorm) and module.training and name:
            model.set_submodule(name, _in_place_of(module, name, make))


def _in_place_of(norm: _BatchNorm, name: str, make: Callable[[_BatchNorm], StepBatchNorm]) -> StepBatchNorm:
    if norm.momentum is None:
        raise UserCodeError(
            f"module {name} ({type(norm).__name__}) averages its statistics over all steps (momentum=None), which "
            "statistics that move once a step do not: give it a momentum, such as 0.1"
        )
    made = make(norm)
    if norm.weight is not None:
        made.weight, made.bias = norm.weight, norm.bias
    if norm.running_mean is not None and norm.running_var is not None:
        made.running_mean.copy_(norm.running_mean)
        made.running_var.copy_(norm.running_var)
    return made
