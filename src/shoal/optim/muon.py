"""Muon (Jordan et al., kellerjordan.github.io/posts/muon, 2024; Liu et al., arXiv:2502.16982), as PyTorch has it:

    m <- mu m + (1 - mu) g,     n = mu m + (1 - mu) g  (Nesterov's form) or m
    x <- (1 - lr w) x - lr s orthogonalised(n)

of matrices; s is 0.2 sqrt(max(rows, columns)) or sqrt(max(1, rows / columns)). More dimensions than two are columns;
of stacked experts each is a matrix. Everything else is AdamW's.

The momentum lies where the parameter does, and is saved and divided with it. What is orthogonalised is whole on its
owner (`shoal.optim.whole`): each matrix on one rank, and the updates come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.maths.orthogonal import orthogonalised, orthogonalising_flops
from shoal.optim.declared import Dims
from shoal.optim.muon_config import Muon
from shoal.optim.whole import WholeOptimizer, as_matrix


def build(config: Muon, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedMuon(
        groups,
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        newton_schulz=NewtonSchulz(config.iterations, config.polish, config.precision),
        adjust=config.adjust,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


class NewtonSchulz(NamedTuple):
    """`iterations`, then `polish` more that bring singular values nearer to 1, in the dtype of the "parameter" or in
    "bfloat16".
    """

    iterations: int = 5
    polish: int = 0
    precision: str = "parameter"


class OwnedMuon(WholeOptimizer):
    """Muon for the groups that say `whole`, AdamW for the others.

    Args:
        params: Dictionaries with `params` and their options; `whole` says that they are orthogonalised. Of plain
            parameters those of two dimensions are.
        lr: The learning rate.
        momentum: The share of the momentum that is kept.
        weight_decay: The decay of weights, apart from the gradient.
        nesterov: Whether the step looks ahead by the momentum.
        newton_schulz: How matrices are orthogonalised.
        adjust: "match_rms_adamw" or "original": s above.
        betas: The decay rates of AdamW's moments.
        eps: Added to AdamW's denominator.
    """

    slots = Muon().slots

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        newton_schulz: NewtonSchulz = NewtonSchulz(),
        adjust: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, newton_schulz=newton_schulz,
            adjust=adjust, betas=betas, eps=eps, stacked=False,
        )  # fmt: skip

    def direction(self, group: dict[str, Any], parameter: Parameter, gradient: Tensor) -> Tensor:
        """Moves the momentum, and gives it or Nesterov's form of it."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """s times the orthogonal factor of a matrix."""
        matrices = direction if group["stacked"] else as_matrix(direction)
        how: NewtonSchulz = group["newton_schulz"]
        dtype = torch.bfloat16 if how.precision == "bfloat16" else None
        found = orthogonalised(matrices, iterations=how.iterations, polish=how.polish, dtype=dtype)
        rows, columns = matrices.shape[-2:]
        by_rms = group["adjust"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if by_rms else math.sqrt(max(1.0, rows / columns))
        return found.mul_(scale).view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations."""
        how: NewtonSchulz = self.defaults["newton_schulz"]
        return orthogonalising_flops(shape[0], math.prod(shape[1:]), iterations=how.iterations + how.polish)
