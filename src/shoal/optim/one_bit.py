"""1-bit Adam and 0/1 Adam: Adam whose momentum travels in one bit a number, with a variance that mostly stands still.

    exact update     AdamW of the gradient: m and v move
    other update     m comes from the exchange in the gradient's place; v stays
    x <- (1 - lr w) x - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^k)) + eps)

t counts updates, k those of v. A number whose v is 0, because no gradient has reached it yet, stays where it is.

    1-bit Adam    the first `exact_steps` updates are exact, and no other          arXiv:2102.02888, algorithm 1
    0/1 Adam      v moves again and again, at intervals of 1, 2, 4, ... updates,   arXiv:2202.06009, section 4.1
                  `variance_updates` times each; so no warm-up has to be chosen

The sum of momenta is `comm.exchanges.momentum`'s. 0/1 Adam's local steps, in which ranks do not talk at all, are
left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.optim.config import OneBitAdam, OneBitLAMB, ZeroOneAdam
from shoal.optim.fused import FusedOptimizer, counted


class MomentumAdam(FusedOptimizer):
    """The optimizer of `config`; `groups` are dictionaries with `params` and options, such as `weight_decay`."""

    def __init__(self, config: OneBitAdam | ZeroOneAdam, groups: list[dict[str, Any]], lr: float) -> None:
        self._config = config
        super().__init__(groups, lr=lr, weight_decay=0.0)

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One update. `gradients` are momenta where the update is not exact."""
        config = self._config
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                zero = torch.zeros((), dtype=torch.float32, device="cpu")
                state |= {"step": zero, "variance_step": zero.clone()}
                state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            step, mean, square = int(counted(state)), state["exp_avg"], state["exp_avg_sq"]
            exact = config.exact(step)
            variance_step = int(counted(state, "variance_step", by=float(exact)))
            if exact:
                mean.lerp_(gradient, 1 - config.beta1)
                square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            else:
                mean.copy_(gradient)
            scale = (1 - config.beta2**variance_step) ** 0.5
            denominator = (square.sqrt() / scale).add_(config.eps).masked_fill_(square == 0, torch.inf)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1 - config.beta1**step))


# 1-bit LAMB: LAMB whose momentum travels in one bit a number, with step lengths that follow a variance of their own.
#
#     all updates       u = m / (sqrt(v) + eps) + w x,      x <- x - lr c u               one c for each tensor
#     exact updates     m and v as in Adam,   c = clip(|x| / |u|),   C <- b3 C + (1 - b3) c
#     the others        m comes from the exchange, v stays,   c = r C
#                       g' = (m - b1 m_before) / (1 - b1),    v' <- b2 v' + (1 - b2) g'^2     (v' = v at first)
#                       r = clip(max over the tensor of (sqrt(v) + eps) / (sqrt(v') + eps))
#
# m and v are corrected for their start from zero, as in Adam. r lies in `FACTORS` and changes by at most `CHANGE` of
# itself in an update, c in `COEFFICIENTS`. (Li et al., "1-bit LAMB", arXiv:2104.06069, algorithm 1, with the constants
# of its section 6.) A number whose v is 0 moves by weight decay alone.


COEFFICIENTS, FACTORS, CHANGE, KEPT = (0.01, 10.0), (0.5, 4.0), 0.1, 0.9
"""Bounds of c and of r, the most that r changes, and b3."""


class MomentumLAMB(FusedOptimizer):
    """The optimizer of `config`; `groups` are dictionaries with `params` and options, such as `weight_decay`.
    Parameters are whole tensors.
    """

    def __init__(self, config: OneBitLAMB, groups: list[dict[str, Any]], lr: float) -> None:
        self._config = config
        super().__init__(groups, lr=lr, weight_decay=0.0)

    def update(self, group: dict[str, Any], parameters: list[Parameter], gradients: list[Tensor]) -> None:
        """One update. `gradients` are momenta where the update is not exact."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if not state:
                one = torch.ones((), dtype=torch.float32, device=parameter.device)
                state |= {
                    "step": torch.zeros_like(one, device="cpu"),
                    "coefficient": torch.zeros_like(one),
                    "factor": one,
                }
                moments = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
                state |= {name: torch.zeros_like(parameter) for name in moments}
            self._update(parameter, gradient, state, lr=group["lr"], decay=group["weight_decay"])

    def _update(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], *, lr: float, decay: float
    ) -> None:
        config, step = self._config, int(counted(state))
        mean, square, exact = state["exp_avg"], state["exp_avg_sq"], config.exact(step)
        if exact:
            mean.lerp_(gradient, 1 - config.beta1)
            square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            state["exp_avg_sq_fresh"].copy_(square)
        else:
            self._follow(gradient, state)
            mean.copy_(gradient)
        scale = (1 - config.beta2 ** min(step, config.exact_steps)) ** 0.5
        denominator = (square.sqrt() / scale).add_(config.eps).masked_fill_(square == 0, torch.inf)
        update = (mean / (1 - config.beta1**step) / denominator).add_(parameter, alpha=decay)
        if exact:
            size, length = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(update)
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0).clamp_(*COEFFICIENTS)
            state["coefficient"].mul_(KEPT).add_(ratio, alpha=1 - KEPT)
        else:
            ratio = state["coefficient"] * state["factor"]
        parameter.sub_(update * (lr * ratio).to(update.dtype))

    def _follow(self, momentum: Tensor, state: dict[str, Tensor]) -> None:
        """Moves the variance that goes on by the gradient in `momentum`, and the factor with it."""
        config, fresh = self._config, state["exp_avg_sq_fresh"]
        gradient = (momentum - config.beta1 * state["exp_avg"]) / (1 - config.beta1)
        fresh.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        largest = ((state["exp_avg_sq"].sqrt() + config.eps) / (fresh.sqrt() + config.eps)).max()
        last = state["factor"].double()
        low, high = (last * (1 - CHANGE)).clamp_(min=FACTORS[0]), (last * (1 + CHANGE)).clamp_(max=FACTORS[1])
        state["factor"].copy_(largest.double().clamp(low, high))
