"""LARS and LAMB: the length of a parameter's step follows the parameter's norm, so that large batches may have large
rates.

LARS (You, Gitman, Ginsburg, arXiv:1708.03888), with the rate outside of the momentum, as PyTorch's SGD has it:

    c = k |x| / (|g| + w |x| + eps),     v <- mu v + c (g + w x),     x <- x - lr v

LAMB (You et al., arXiv:1904.00962, algorithm 2, with phi the identity):

    m <- b1 m + (1 - b1) g,     v <- b2 v + (1 - b2) g^2,     r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    u = r + w x,     x <- x - lr (|x| / |u|) u

Norms are those of whole parameters: each rank adds up the squares of its parts, and one all-reduce sums them for all
parameters. A factor is 1 where one of the norms is 0, and for parameters whose group says `trust` is false.

On a CPU loops in C do both passes (`codec/core/layerwise.c`). What stands here in torch is their oracle, and what runs
on other devices, for other dtypes and without a C compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.codec.kernels import Kernels, kernels_for
from shoal.optim.declared import Granularity, Slot, counter
from shoal.optim.fused import FusedOptimizer, GroupTensors
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
        columns = [torch.stack(list(_lengths(each))).double().square() for each in tensors if each]
        squares = torch.stack(columns, dim=1) if columns else torch.zeros(0, len(tensors), dtype=torch.float64)
        return self._roots(parameters, squares)

    def _turns(self, count: int) -> list[range]:
        """Which of `count` parameters the kernels take through both passes together: all that one message sums; alone,
        one, whose numbers are then still in a cache.
        """
        alone = self._sums is None or self._sums.alone
        return [range(i, i + 1) for i in range(count)] if alone else [range(count)]

    def _with_norms(
        self, turn: range, parameters: list[Parameter], squares: list[list[float]]
    ) -> list[tuple[int, float, float]]:
        """Each parameter of a turn with the two norms of which a rank has the `squares`; the last one first, for the
        same reason.
        """
        own = torch.tensor(squares, dtype=torch.float64).view(len(turn), 2)
        norms = self._roots([parameters[i] for i in turn], own)
        return list(zip(turn, *norms, strict=True))[::-1]

    def _roots(self, parameters: list[Parameter], squares: Tensor) -> list[list[float]]:
        """The norms of whole parameters, from the sums of squares `[parameters, n]` of the parts: `n` lists."""
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

    def update_all(self, work: list[GroupTensors]) -> None:
        """One step of everything."""
        parameters = [p for one in work for p in one.parameters]
        gradients = [g for one in work for g in one.gradients]
        groups = [one.group for one in work for _ in one.parameters]
        for p in (p for p in parameters if not self.state[p]):
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        kernels = _kernels(parameters, gradients)
        if kernels is not None:
            self._update_by(kernels, groups, parameters, gradients)
            return
        own, of_gradient = self._norms(parameters, [p.detach() for p in parameters], gradients)
        for group, p, g, size, length in zip(groups, parameters, gradients, own, of_gradient, strict=True):
            decay = group["weight_decay"]
            scaled = (g.add(p, alpha=decay) if decay else g).mul(self._factor(group, size, length))
            velocity = self.state[p]["momentum_buffer"].mul_(group["momentum"]).add_(scaled)
            p.add_(scaled, alpha=-group["lr"]) if group["nesterov"] else None
            p.add_(velocity, alpha=-group["lr"] * (group["momentum"] if group["nesterov"] else 1.0))

    def _update_by(
        self, kernels: Kernels, groups: list[dict[str, Any]], parameters: list[Parameter], gradients: list[Tensor]
    ) -> None:
        """The same by the kernels."""
        for turn in self._turns(len(parameters)):
            squares = [kernels.lars_norms(parameters[i], gradients[i]) for i in turn]
            for i, size, length in self._with_norms(turn, parameters, squares):
                group = groups[i]
                kernels.lars_step(
                    parameters[i], gradients[i], self.state[parameters[i]]["momentum_buffer"],
                    factor=self._factor(group, size, length), decay=group["weight_decay"],
                    momentum=group["momentum"], lr=group["lr"], nesterov=group["nesterov"],
                )  # fmt: skip

    def _factor(self, group: dict[str, Any], size: float, length: float) -> float:
        """c, from the norms of the weights and of the gradient."""
        if not (group["trust"] and size > 0 and length > 0):
            return 1.0
        factor = group["coefficient"] * size / (length + group["weight_decay"] * size + group["eps"])
        return min(factor, group["max_trust"] or factor)


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

    def update_all(self, work: list[GroupTensors]) -> None:
        """One step of everything."""
        parameters = [p for one in work for p in one.parameters]
        kernels = _kernels(parameters, [g for one in work for g in one.gradients])
        if kernels is not None:
            self._update_by(kernels, work)
            return
        groups = [one.group for one in work for _ in one.parameters]
        steps = [step for one in work for step in self._steps(one)]
        own, lengths = self._norms(parameters, [p.detach() for p in parameters], steps)
        for group, p, step, size, length in zip(groups, parameters, steps, own, lengths, strict=True):
            if (kept := _kept(group)) != 1.0:
                p.mul_(kept)
            p.add_(step, alpha=-group["lr"] * _trust(group, size, length))

    def _update_by(self, kernels: Kernels, work: list[GroupTensors]) -> None:
        """The same by the kernels."""
        groups = [one.group for one in work for _ in one.parameters]
        parameters = [p for one in work for p in one.parameters]
        gradients = [g for one in work for g in one.gradients]
        states = [state for one in work for state in self._states(one)]
        moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in states]
        factors = [_factors(group, float(state["step"])) for group, state in zip(groups, states, strict=True)]
        for turn in self._turns(len(parameters)):
            squares = [kernels.lamb_moments(parameters[i], gradients[i], moments[i], factors[i]) for i in turn]
            for i, size, length in self._with_norms(turn, parameters, squares):
                rate = groups[i]["lr"] * _trust(groups[i], size, length)
                kernels.lamb_step(parameters[i], moments[i], factors[i], kept=_kept(groups[i]), rate=rate)

    def _states(self, work: GroupTensors) -> list[dict[str, Tensor]]:
        """The state of each parameter, one step later."""
        for parameter in work.parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        states = [self.state[parameter] for parameter in work.parameters]
        torch._foreach_add_([state["step"] for state in states], 1)  # pyright: ignore[reportPrivateImportUsage]
        return states

    def _steps(self, work: GroupTensors) -> list[Tensor]:
        """u of each parameter. Adam's part of it is what PyTorch's fused kernel subtracts from zeros."""
        group, parameters, states = work.group, work.parameters, self._states(work)
        counters = [state["step"] for state in states]
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


def _lengths(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The 2-norm of each; those of half types are added up in float32."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return torch._foreach_norm(tensors, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]


def _kernels(parameters: list[Parameter], gradients: list[Tensor]) -> Kernels | None:
    """The loops in C, if they can take all of it."""
    tensors = [*parameters, *gradients]
    return kernels_for(*tensors) if tensors and all(tensor.is_contiguous() for tensor in tensors) else None


def _factors(group: dict[str, Any], step: float) -> list[float]:
    """What both passes of LAMB multiply by, in the order of `core/layerwise.c`."""
    beta1, beta2 = group["betas"]
    first, root = (1 / (1 - beta1**step), (1 - beta2**step) ** -0.5) if group["bias_correction"] else (1.0, 1.0)
    decay = group["weight_decay"] if group["decay_in_norm"] else 0.0
    return [beta1, 1 - beta1, beta2, 1 - beta2, first, root, group["eps"], decay]


def _kept(group: dict[str, Any]) -> float:
    """By what a decay that is apart multiplies the weights."""
    return 1.0 if group["decay_in_norm"] else 1 - group["lr"] * group["weight_decay"]


def _trust(group: dict[str, Any], size: float, length: float) -> float:
    """The factor of the rate, from the norms of the weights and of their update."""
    factor = size / length if group["trust"] and size > 0 and length > 0 else 1.0
    return min(factor, group["max_trust"] or factor)
