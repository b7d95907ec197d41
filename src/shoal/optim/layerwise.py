"""LARS and LAMB: the length of a parameter's step follows the parameter's norm, so that large batches may have large
rates.

LARS (You, Gitman, Ginsburg, arXiv:1708.03888), with the rate outside of the momentum, as PyTorch's SGD has it:

    c = k |x| / (|g| + w |x| + eps),     v <- mu v + c (g + w x),     x <- x - lr v

LAMB (You et al., arXiv:1904.00962, algorithm 2, with phi the identity):

    m <- b1 m + (1 - b1) g,     v <- b2 v + (1 - b2) g^2,     r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    u = r + w x,     x <- x - lr (|x| / |u|) u

Norms are those of whole parameters: each rank adds up the squares of its parts, and one all-reduce sums them for all
parameters. A factor is 1 where one of the norms is 0, and for parameters whose group says `trust` is false.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.declared import Granularity, Slot, counter
from shoal.optim.fused import FusedOptimizer, Work
from shoal.optim.kinds import LAMB, LARS
from shoal.optim.parts import Parts, PartSums


def lars(config: LARS, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return LayerwiseSGD(
        groups,
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        coefficient=config.coefficient,
        eps=config.eps,
        max_trust=config.max_trust,
    )


def lamb(config: LAMB, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return LayerwiseAdam(
        groups,
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        bias_correction=config.bias_correction,
        decay_in_norm=config.decay_in_norm,
        max_trust=config.max_trust,
    )


class _Layerwise(FusedOptimizer):
    """What both have in common: steps, the norms of parameters and steps, and one message."""

    works_on: Granularity = "elements"
    _sums: PartSums | None = None

    def connect(self, parts: Parts) -> None:
        """Norms become those of whole parameters."""
        self._sums = PartSums(parts)

    def _norms(self, parameters: list[Parameter], *tensors: list[Tensor]) -> list[list[float]]:
        """The 2-norms of each of `tensors`, which has one for each parameter, over the whole parameters."""
        if not parameters and self._sums is None:
            return [[] for _ in tensors]
        columns = [torch.stack(torch._foreach_norm(each)).double().square() for each in tensors if each]  # pyright: ignore[reportPrivateImportUsage]
        squares = torch.stack(columns, dim=1) if columns else torch.zeros(0, len(tensors), dtype=torch.float64)
        totals = squares if self._sums is None else self._sums(parameters, squares)
        return totals.sqrt().T.tolist()


class LayerwiseSGD(_Layerwise):
    """LARS.

    Args:
        params: Parameters, or dictionaries with `params` and their options; `trust` says whether the rate follows the
            norms.
        lr: The learning rate.
        momentum: The share of the velocity that is kept.
        weight_decay: The decay of weights, a part of the gradient.
        nesterov: Whether the step looks ahead by the momentum.
        coefficient: k above.
        eps: Added to the norm of the gradient.
        max_trust: Largest c.
    """

    slots = (Slot("momentum_buffer"),)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        *,
        nesterov: bool = False,
        coefficient: float = 1e-3,
        eps: float = 1e-8,
        max_trust: float | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, coefficient=coefficient,
            eps=eps, max_trust=max_trust, trust=True,
        )  # fmt: skip

    def update_all(self, work: list[Work]) -> None:
        """One step of everything."""
        parameters = [p for one in work for p in one.parameters]
        gradients = [g for one in work for g in one.gradients]
        groups = [one.group for one in work for _ in one.parameters]
        own, of_gradient = self._norms(parameters, [p.detach() for p in parameters], gradients)
        for group, p, g, size, length in zip(groups, parameters, gradients, own, of_gradient, strict=True):
            decay, factor = group["weight_decay"], 1.0
            if group["trust"] and size > 0 and length > 0:
                factor = group["coefficient"] * size / (length + decay * size + group["eps"])
                factor = min(factor, group["max_trust"] or factor)
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            scaled = (g.add(p, alpha=decay) if decay else g).mul(factor)
            velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(scaled)
            p.add_(scaled, alpha=-group["lr"]) if group["nesterov"] else None
            p.add_(velocity, alpha=-group["lr"] * (group["momentum"] if group["nesterov"] else 1.0))


class LayerwiseAdam(_Layerwise):
    """LAMB.

    Args:
        params: Parameters, or dictionaries with `params` and their options; `trust` says whether the rate follows the
            norms.
        lr: The learning rate.
        betas: The decay rates of both moments.
        eps: Added to the denominator.
        weight_decay: The decay of weights.
        bias_correction: Whether moments are corrected for their start from zero.
        decay_in_norm: Whether the decay is a part of u; else it is apart, as in AdamW.
        max_trust: Largest factor of a rate.
    """

    slots = (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"))

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 4e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        decay_in_norm: bool = True,
        max_trust: float | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
            decay_in_norm=decay_in_norm, max_trust=max_trust, trust=True,
        )  # fmt: skip

    def update_all(self, work: list[Work]) -> None:
        """One step of everything."""
        parameters = [p for one in work for p in one.parameters]
        groups = [one.group for one in work for _ in one.parameters]
        steps = [step for one in work for step in self._steps(one)]
        own, lengths = self._norms(parameters, [p.detach() for p in parameters], steps)
        for group, p, step, size, length in zip(groups, parameters, steps, own, lengths, strict=True):
            factor = size / length if group["trust"] and size > 0 and length > 0 else 1.0
            factor = min(factor, group["max_trust"] or factor)
            if group["weight_decay"] and not group["decay_in_norm"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(step, alpha=-group["lr"] * factor)

    def _steps(self, work: Work) -> list[Tensor]:
        """u of each parameter. Adam's part of it is what PyTorch's fused kernel subtracts from zeros."""
        group, parameters = work.group, work.parameters
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        states = [self.state[parameter] for parameter in parameters]
        counters = [state["step"] for state in states]
        torch._foreach_add_(counters, 1)  # pyright: ignore[reportPrivateImportUsage]
        if group["bias_correction"]:
            steps = self._corrected(group, parameters, work.gradients, states, counters)
        else:
            steps = self._uncorrected(group, work.gradients, states)
        if group["weight_decay"] and group["decay_in_norm"]:
            held = [p.detach() for p in parameters]
            torch._foreach_add_(steps, held, alpha=group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        return steps

    def _corrected(
        self,
        group: dict[str, Any],
        parameters: list[Parameter],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        counters: list[Tensor],
    ) -> list[Tensor]:
        steps = [torch.zeros_like(parameter) for parameter in parameters]
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            steps, gradients, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], counters,
            lr=-1.0, beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=0.0, eps=group["eps"],
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return steps

    def _uncorrected(
        self, group: dict[str, Any], gradients: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        steps = []
        for gradient, state in zip(gradients, states, strict=True):
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            steps.append(state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(group["eps"]))
        return steps
