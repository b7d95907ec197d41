"""SOAP (Vyas et al., arXiv:2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioners.

For a matrix G of gradients, with both sides' means L, R and their eigenvectors P, Q:

    M <- b1 M + (1 - b1) G,     G' = P^T G Q,     V <- b2 V + (1 - b2) G'^2
    U = P [ (P^T M Q / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps) ] Q^T,     X <- (1 - lr w) X - lr U
    L <- b L + (1 - b) G G^T,   R <- b R + (1 - b) G^T G

and every `every` updates P <- qr(L P), Q <- qr(R Q), one step of the power iteration, its columns in the order of their
eigenvalues, V's with them. The first gradient gives L and R, whose eigenvectors are computed whole, and no update. A
side that is longer than `largest_side` stays as it is. More dimensions than two are columns.

All of a matrix's state is on its owner (`shoal.optim.whole`), which makes the update; everything else is AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.optim.declared import Dims
from shoal.optim.preconditioned_config import SOAP, sides
from shoal.optim.whole import WholeOptimizer, as_matrix

_SIDES = ("rows", "columns")


def build(config: SOAP, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedSOAP(
        groups,
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        shampoo_beta=config.shampoo_beta,
        every=config.every,
        largest_side=config.largest_side,
    )


class OwnedSOAP(WholeOptimizer):
    """SOAP for the groups that say `whole`, AdamW for the others.

    Args:
        params: Dictionaries with `params` and their options; of plain parameters those of two dimensions are `whole`.
        lr: The learning rate.
        betas: The decay rates of both moments.
        eps: Added to the denominator.
        weight_decay: The decay of weights, apart from the gradient.
        shampoo_beta: The decay rate of L and R.
        every: Updates between two changes of the basis.
        largest_side: Sides of more rows or columns stay as they are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float = 0.95,
        every: int = 10,
        largest_side: int = 4096,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, shampoo_beta=shampoo_beta, every=every,
            largest_side=largest_side,
        )  # fmt: skip
        self.slots = SOAP(largest_side=largest_side).slots

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """U, and the state of the next update."""
        gradient = as_matrix(direction)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=direction.device)
            state |= {name: torch.zeros_like(direction) for name in ("soap_avg", "soap_avg_sq")}
            _start(gradient, state, group["largest_side"])
            return torch.zeros_like(direction)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        mean, square = as_matrix(state["soap_avg"]), as_matrix(state["soap_avg_sq"])
        mean.lerp_(gradient, 1 - beta1)
        turned = _into_basis(gradient, state)
        square.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        found = _out_of_basis(_into_basis(mean, state).div_(scale), state).div_(1 - beta1**step)
        _follow(gradient, state, group["shampoo_beta"])
        if step % group["every"] == 0:
            _turn(square, state)
        return found.view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations of an update, without those of a change of the basis."""
        rows, columns = sides(shape)
        return 8.0 * rows * columns * (rows + columns)


def _start(gradient: Tensor, state: dict[str, Any], largest: int) -> None:
    for name, side in zip(_SIDES, (gradient, gradient.mT), strict=True):
        if side.shape[0] <= largest:
            state[f"mean_{name}"] = side @ side.mT
            state[f"basis_{name}"] = torch.linalg.eigh(state[f"mean_{name}"])[1].flip(-1).contiguous()


def _into_basis(x: Tensor, state: dict[str, Any]) -> Tensor:
    x = state["basis_rows"].mT @ x if "basis_rows" in state else x.clone()
    return x @ state["basis_columns"] if "basis_columns" in state else x


def _out_of_basis(x: Tensor, state: dict[str, Any]) -> Tensor:
    x = state["basis_rows"] @ x if "basis_rows" in state else x
    return x @ state["basis_columns"].mT if "basis_columns" in state else x


def _follow(gradient: Tensor, state: dict[str, Any], beta: float) -> None:
    for name, side in zip(_SIDES, (gradient, gradient.mT), strict=True):
        if f"mean_{name}" in state:
            state[f"mean_{name}"].addmm_(side, side.mT, beta=beta, alpha=1 - beta)


def _turn(square: Tensor, state: dict[str, Any]) -> None:
    """One power iteration of each side; `square` is kept in step with the order of the columns."""
    for dim, name in enumerate(_SIDES):
        if f"mean_{name}" not in state:
            continue
        mean, basis = state[f"mean_{name}"], state[f"basis_{name}"]
        order = (basis * (mean @ basis)).sum(0).argsort(descending=True)
        square.copy_(square.index_select(dim, order))
        state[f"basis_{name}"] = torch.linalg.qr(mean @ basis[:, order])[0]
