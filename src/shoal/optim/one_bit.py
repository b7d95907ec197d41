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

from shoal.optim.config import OneBitAdam, ZeroOneAdam
from shoal.optim.fused import FusedOptimizer


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
                one = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state |= {"step": one, "variance_step": one.clone()}
                state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] += 1
            step, mean, square = int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
            if config.exact(step):
                state["variance_step"] += 1
                mean.lerp_(gradient, 1 - config.beta1)
                square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
            else:
                mean.copy_(gradient)
            scale = (1 - config.beta2 ** int(state["variance_step"])) ** 0.5
            denominator = (square.sqrt() / scale).add_(config.eps).masked_fill_(square == 0, torch.inf)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.addcdiv_(mean, denominator, value=-group["lr"] / (1 - config.beta1**step))
