"""RMSProp, NAdam and RAdam by PyTorch, Adafactor (below), and the optimizers whose tables are their equations
(`Elementwise`: Lion, Adan). But for Adafactor they treat every number alone, so that a parameter may be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.declared import Common, Elementwise, Granularity, Slot
from shoal.optim.fused import FusedOptimizer, counted
from shoal.optim.kinds import Adafactor, NAdam, RAdam, RMSprop
from shoal.optim.owners import WholeOptimizer
from shoal.optim.parts import Parts, PartSums


def rmsprop(config: RMSprop, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's RMSprop."""
    return torch.optim.RMSprop(
        groups, lr=lr, alpha=config.alpha, eps=config.eps, momentum=config.momentum, centered=config.centered
    )


def nadam(config: NAdam, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's NAdam, with AdamW's decay."""
    return torch.optim.NAdam(
        groups,
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        momentum_decay=config.momentum_decay,
        decoupled_weight_decay=True,
    )


def radam(config: RAdam, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """PyTorch's RAdam, with AdamW's decay."""
    return torch.optim.RAdam(
        groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, decoupled_weight_decay=True
    )


def elementwise(config: Elementwise, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return ElementOptimizer(groups, config, lr=lr)


class ElementOptimizer(FusedOptimizer):
    """The optimizer of a table that is an equation, such as Lion: `ElementOptimizer(parameters, Lion(lr=1e-4))`.

    Args:
        params: Parameters, or dictionaries with `params` and their options, which may be any of the table's keys.
        config: The table, whose `update` is the equation; its keys are options of every group that does not say them.
        lr: The learning rate; None: the table's.
    """

    works_on: Granularity = "elements"

    def __init__(self, params: Iterable[Any], config: Elementwise, *, lr: float | None = None) -> None:
        own = [key for key in config.__struct_fields__ if key not in Common.__struct_fields__]
        options = {key: getattr(config, key) for key in (*own, "weight_decay")}
        super().__init__(params, **(options if lr is None else options | {"lr": lr}))
        self.slots, self._update = config.slots, config.update

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One update of each."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                state |= {slot.name: _zeros(slot, parameter) for slot in self.slots}
            if "step" in state:
                state["step"] += 1
            t = state.get("step", torch.zeros((), device=parameter.device)).double()
            self._update(parameter, gradient, state, group, t)


def _zeros(slot: Slot, parameter: Parameter) -> Tensor:
    if slot.like_parameter:
        return torch.zeros_like(parameter)
    return torch.zeros(slot.shape(tuple(parameter.shape)), device=parameter.device)


# Adafactor (Shazeer and Stern, arXiv:1804.04235), as PyTorch has it: a second moment kept as a row and a column.
#
#     R <- b R + (1 - b) rowmean(g^2),     C <- b C + (1 - b) colmean(g^2),     b = 1 - t^beta2_decay
#     V = R C / mean(R),     u = g / sqrt(V),     u <- u / max(1, rms(u) / d)
#     x <- (1 - lr w) x - min(lr, 1 / sqrt(t)) max(eps2, rms(x)) u
#
# of matrices, the last two dimensions of what has more; a vector keeps V itself. A parameter's state is on its owner
# (`shoal.optim.owners`), which makes u; rms(x) is that of the whole parameter, summed over its parts.


def adafactor(config: Adafactor, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedAdafactor(
        groups, lr=lr, beta2_decay=config.beta2_decay, eps=(config.eps1, config.eps2), threshold=config.threshold
    )


class OwnedAdafactor(WholeOptimizer):
    """Adafactor.

    Args:
        params: Parameters, or dictionaries with `params` and their options.
        lr: The largest rate.
        beta2_decay: The power of t in the decay of the second moment.
        eps: The least root of the second moment (None: of the dtype), and the least rms(x).
        threshold: d above.
        weight_decay: The decay of weights, apart from the gradient.
    """

    slots = Adafactor().slots
    _sums: PartSums | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        params = list(params)
        groups = params if params and isinstance(params[0], dict) else [{"params": params}]
        super().__init__(
            groups, lr=lr, beta2_decay=beta2_decay, eps=eps, threshold=threshold, weight_decay=weight_decay
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer here; nothing is AdamW's, whatever the group says."""
        super().add_param_group({**param_group, "whole": True})

    def connect(self, parts: Parts) -> None:
        """Parameters become whole on their owners, and so do their norms."""
        super().connect(parts)
        self._sums = PartSums(parts)

    def scales(self, parameters: list[Parameter]) -> list[float]:
        """max(eps2, rms(x)) of each."""
        least = self.defaults["eps"][1]
        squares = [p.detach().double().square().sum() for p in parameters]
        own = [
            torch.stack([square, torch.full_like(square, p.numel())])
            for p, square in zip(parameters, squares, strict=True)
        ]
        rows = torch.stack(own) if own else torch.zeros(0, 2, dtype=torch.float64)
        totals = rows if self._sums is None else self._sums(parameters, rows)
        return [max(least, math.sqrt(square / numel)) for square, numel in totals.tolist()]

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """u times min(1, 1 / (lr sqrt(t)))."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state |= {name: direction.new_zeros(shape) for name, shape in _moments(direction).items()}
        step = counted(state)
        kept, least = 1 - step ** group["beta2_decay"], group["eps"][0] or torch.finfo(direction.dtype).eps
        square = direction.square()
        if direction.ndim > 1:
            row = state["row_var"].lerp_(square.mean(-1, keepdim=True), 1 - kept)
            column = state["col_var"].lerp_(square.mean(-2, keepdim=True), 1 - kept)
            mean = row.mean(-2, keepdim=True).clamp_(min=least)
            square = (row / mean) @ column  # row @ column would leave float32's range
        else:
            square = state["variance"].lerp_(square, 1 - kept)
        update = direction * square.clamp(min=least * least).rsqrt_()
        rms = torch.linalg.vector_norm(update).double() / math.sqrt(update.numel())
        rate = min(1.0, 1 / (group["lr"] * math.sqrt(step))) if group["lr"] else 0.0
        factor = torch.full_like(rms, rate).div_((rms / group["threshold"]).clamp_(min=1.0))
        return update.to(torch.promote_types(update.dtype, torch.float32)).mul_(factor).to(update.dtype)


def _moments(x: Tensor) -> dict[str, tuple[int, ...]]:
    if x.ndim < 2:
        return {"variance": tuple(x.shape)}
    return {"row_var": (*x.shape[:-1], 1), "col_var": (*x.shape[:-2], 1, x.shape[-1])}
