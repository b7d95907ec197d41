"""Dion (Ahn et al., arXiv:2504.05295, algorithm 1): orthonormal updates of low rank, by a power iteration that goes
on from update to update.

    B = M + G,     P = qr(B Q),     R = B^T P,     M <- B - (1 - mu) P R^T,     Q <- R with columns of norm 1
    X <- (1 - lr w) X - lr sqrt(rows / columns) P Q^T

of matrices `[rows, columns]`, P and Q with r columns. What the rank leaves out stays in M, and comes later. It costs
some products of a matrix with r columns, and no iterations of whole matrices as Muon's. Q begins with the same numbers
in every layout. More dimensions than two are columns; everything else is AdamW's.

All of a matrix's state is on its owner (`shoal.optim.whole`), which makes the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.maths.counter import indices, key_of, normal
from shoal.optim.declared import Dims
from shoal.optim.muon_config import Dion, dion_rank
from shoal.optim.whole import WholeOptimizer, as_matrix


def build(config: Dion, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedDion(
        groups,
        lr=lr,
        momentum=config.momentum,
        rank_fraction=config.rank_fraction,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


class OwnedDion(WholeOptimizer):
    """Dion for the groups that say `whole`, AdamW for the others.

    Args:
        params: Dictionaries with `params` and their options; of plain parameters those of two dimensions are `whole`.
        lr: The learning rate.
        momentum: mu above.
        weight_decay: The decay of weights, apart from the gradient.
        rank_fraction: r, as a share of the shorter side.
        betas: The decay rates of AdamW's moments.
        eps: Added to AdamW's denominator.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        *,
        rank_fraction: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, rank_fraction=rank_fraction, betas=betas,
            eps=eps,
        )  # fmt: skip
        self.slots = Dion(rank_fraction=rank_fraction).slots

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """sqrt(rows / columns) P Q^T, and the state of the next update."""
        gradient = as_matrix(direction)
        rows, columns = gradient.shape
        if not state:
            state["dion_momentum"] = torch.zeros_like(direction)
            state["right_factor"] = _first_factor(columns, dion_rank((rows, columns), group["rank_fraction"]), gradient)
        buffer = as_matrix(state["dion_momentum"]).add_(gradient)
        left = torch.linalg.qr(buffer @ state["right_factor"])[0]
        right = buffer.mT @ left
        buffer.addmm_(left, right.mT, alpha=-(1 - group["momentum"]))
        lengths = torch.linalg.vector_norm(right, dim=0, keepdim=True)
        state["right_factor"] = right / lengths.clamp_(min=torch.finfo(right.dtype).tiny)
        return (left @ state["right_factor"].mT).mul_(math.sqrt(rows / columns)).view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations."""
        rows, columns = shape[0], math.prod(shape[1:])
        return 8.0 * rows * columns * dion_rank(shape, self.defaults["rank_fraction"])


def _first_factor(columns: int, rank: int, like: Tensor) -> Tensor:
    """Orthonormal columns that follow from the shape alone."""
    counters = indices((columns, rank), (0, 0), (columns, rank), device=like.device)
    return torch.linalg.qr(normal(key_of(0, "dion"), counters, dtype=torch.float64))[0].to(like.dtype)
