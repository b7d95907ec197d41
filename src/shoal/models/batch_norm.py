"""Batch normalisation over declared groups of samples, and over a microbatch of all ranks (`model.batch_norm`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from shoal.errors import UserCodeError

# What batch normalisations have in common whose running statistics move once a step, whatever the step's microbatches.
#
# Batch normalisation (Ioffe and Szegedy, arXiv:1502.03167) over some set of samples with mean m and variance v:
#
#     y = (x - m) / sqrt(v + eps) * weight + bias
#
# Which samples make a set is the subclass's. Running statistics are a part of the step, not of the forward: a step that
# is skipped must leave none, a step that is accumulated must count once, and every replica must end with the same. So a
# layer only adds up what it sees, and the engine commits the sum over all replicas once a step (`StepStatistics`):
#
#     forward, forward, ...                          each adds to the layer's sums
#     total = all_reduce(layer.step_sums())          over the replicas
#     layer.commit_sums(total)                       or layer.discard_sums() when the step is skipped
#
# With `count` sets over all replicas, whose means and unbiased variances were added up,
#
#     running <- (1 - momentum) running + momentum sum / count
#
# A user's subclass of `torch.nn.BatchNorm2d` may do more than normalise: timm's end with an activation. Its forward
# stays, and only its call of `F.batch_norm` is answered here.


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
    around: tuple[_BatchNorm] | None
    """The layer whose forward calls for this normalisation, in a tuple: its modules are those of this one."""

    def __init__(self, channels: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum, self.around = channels, eps, momentum, None
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
        """Returns the shape and type of `x`. In training it raises what `normalised` does.

        Raises `UserCodeError` where the layer `around` does not normalise once.
        """
        if self.around is None:
            return self.normalisation(x)
        (layer,) = self.around
        if layer.training != self.training:
            layer.training = self.training
        with _InPlaceOfBatchNorm(self, layer) as calls:
            y = layer(x)
        if calls.count != 1:
            raise UserCodeError(
                f"a {type(layer).__name__} called F.batch_norm {calls.count} times in a forward, and model.batch_norm "
                "puts other statistics in the place of one call: use nn.BatchNorm2d itself, GroupNorm or LayerNorm"
            )
        return y

    def normalisation(self, x: Tensor) -> Tensor:
        """`x` normalised, without what a layer `around` adds."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            normalised = self.normalised(wide)
            return normalised if wide is x else normalised.to(x.dtype)
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
        counts, means, variances = self.totals.split((1, self.channels, self.channels))
        counts.add_(count)
        means.add_(mean)
        variances.add_(unbiased)


_PLAIN = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_OWN = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
"""Parameters and buffers of PyTorch's batch norms."""


class _InPlaceOfBatchNorm(TorchFunctionMode):
    """Answers the call of `F.batch_norm` in the forward of `layer` by the normalisation of `norm`."""

    def __init__(self, norm: StepBatchNorm, layer: _BatchNorm) -> None:
        super().__init__()
        self.norm, self.layer, self.count = norm, layer, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.count += 1
        given, layer = _given(*args, **(kwargs or {})), self.layer
        same = given.weight is layer.weight and given.bias is layer.bias and given.eps == layer.eps
        if not same or given.training != layer.training:
            raise UserCodeError(
                f"a {type(layer).__name__} calls F.batch_norm with another weight, bias, eps or training than its own, "
                "and model.batch_norm would leave that out: use nn.BatchNorm2d itself, GroupNorm or LayerNorm"
            )
        return self.norm.normalisation(given.input)


class _Given(NamedTuple):
    """What `F.batch_norm` was given, of what decides its result."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    training: bool
    eps: float


def _given(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> _Given:  # fmt: skip
    """Has the signature of `F.batch_norm`: Python binds arguments faster than `inspect`."""
    return _Given(input, weight, bias, training, eps)


def replace_norms(model: nn.Module, make: Callable[[_BatchNorm], StepBatchNorm]) -> None:
    """Puts what `make` makes into the place of every batch norm of `model` that trains; parameters and buffers stay,
    and so does what a subclass of PyTorch's layers or a hook adds. A layer that stands in two places is still one.

    Raises `UserCodeError` for one that averages over all steps (`momentum=None`).
    """
    made: dict[nn.Module, StepBatchNorm] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _BatchNorm) and module.training and name:
            if module not in made:
                made[module] = _in_place_of(module, name, make)
            model.set_submodule(name, made[module])


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
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
    if type(norm).forward not in _PLAIN or norm._forward_hooks or norm._forward_pre_hooks:
        others = {*norm._parameters, *norm._buffers} - _OWN
        if others:
            raise UserCodeError(
                f"module {name} ({type(norm).__name__}) has {min(others)!r}, which PyTorch's batch norms have "
                "not, and model.batch_norm would leave it out: put it into a module of its own"
            )
        made.around = (norm,)
        for child, module in norm.named_children():
            made.add_module(child, module)
    return made


# Groups: statistics that no layout can change.
#
# Batch normalisation ties a sample to whatever shares its batch, hence to the microbatch and the world size. Here the
# neighbours are declared: every `group_samples` consecutive samples are normalised by their own mean and variance
# ("ghost batches", arXiv:1705.08741), in whichever batch they arrive.
#
# `with_grouped_norm` puts such layers in the place of a user's `torch.nn.BatchNorm` layers.


FUSED_GROUPS = 8
"""Of more groups in a batch, operators over all of them at once are faster than a kernel for each."""


class GroupedBatchNorm(StepBatchNorm):
    """Normalises `[groups * group_samples, channels, ...]`, each group by its own statistics."""

    def __init__(
        self, channels: int, group_samples: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__(channels, eps=eps, momentum=momentum, affine=affine)
        self.group_samples = group_samples

    def normalised(self, x: Tensor) -> Tensor:
        """Raises `ValueError` for a batch of incomplete groups."""
        count = self._groups_in(x)
        if 0 < count <= FUSED_GROUPS and self.group_samples * math.prod(x.shape[2:]) > 1:
            return self._fused(x, count)
        groups = x.unflatten(0, (count, self.group_samples))
        var, mean = torch.var_mean(groups, dim=(1, *range(3, groups.ndim)), correction=0, keepdim=True)
        numel = groups[0, :, 0].numel()
        sums = torch.stack((mean, var * (numel / max(1, numel - 1)))).detach().to(torch.float64).flatten(2).sum(1)
        self.add(sums[0], sums[1], count=mean.shape[0])
        return self.scaled(groups, mean, var, [1] * (x.ndim - 2)).flatten(0, 1)

    def _fused(self, x: Tensor, count: int) -> Tensor:
        """Each group by PyTorch's kernel, in half the time of the operators; it leaves mean and unbiased variance
        behind, as running statistics of which one batch is the whole.
        """
        weight, bias = self.weight, self.bias
        if weight is not None and bias is not None and (weight.dtype, bias.dtype) != (x.dtype, x.dtype):
            weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        if count == 1:  # as always where a rank's samples are a group: there are many such layers
            mean, var = x.new_zeros(2, self.channels).unbind()
            enabled = torch.backends.cudnn.enabled
            normalised = torch.batch_norm(x, weight, bias, mean, var, True, 1.0, self.eps, enabled)
            self.add(mean, var, count=1)
            return normalised
        statistics = x.new_zeros(2, count, self.channels)
        normalised = [
            torch.batch_norm(group, weight, bias, mean, var, True, 1.0, self.eps, torch.backends.cudnn.enabled)
            for group, mean, var in zip(x.split(self.group_samples), *statistics, strict=True)
        ]
        self.add(*statistics.sum(1, dtype=torch.float64).unbind(), count=count)
        return torch.cat(normalised)

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


# Synchronised: by the statistics of a microbatch over all ranks that hold other samples of it.
#
# What `torch.nn.SyncBatchNorm` computes, on CPU tensors too, with uneven numbers of samples, and without samples that
# only make microbatches alike. Each rank takes its own count, mean and sum of squared distances from that mean; the
# ranks tell each other, and each combines them (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm
# for Computing Sample Variances", 1979), in float64 and in the order of ranks, so that all have the same bits:
#
#     n = sum n_r        m = sum n_r m_r / n        v = sum (M_r + n_r (m_r - m)^2) / n
#
# Distances are from a mean at all times: E[x^2] - E[x]^2 would lose the variance of a channel whose mean is large. The
# exchange is differentiable, so that the gradient of a sample comes from all samples that it was normalised with.
#
# Running statistics move once a step (`StepBatchNorm`), by the mean of the microbatches' statistics. Every rank adds
# the same ones, so that the sum over ranks has the same mean.


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
