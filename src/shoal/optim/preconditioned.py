"""Optimizers that precondition whole matrices from both sides: Shampoo and SOAP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.maths.products import product, symmetric_product
from shoal.optim.declared import Dims
from shoal.optim.fused import counted
from shoal.optim.matrix_kinds import SOAP, Shampoo, sides
from shoal.optim.owners import WholeOptimizer, as_matrix

# Shampoo (Gupta et al., arXiv:1802.09568) by blocks, with the length of Adam's step (Shi et al., arXiv:2309.06497):
#
#     L <- b2 L + (1 - b2) G G^T,     R <- b2 R + (1 - b2) G^T G                of each block G of a matrix of gradients
#     M <- b1 M + (1 - b1) G,         D = L^(-1/4) M R^(-1/4)
#     A = (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps),   V as Adam has it
#     X <- (1 - lr w) X - lr (|A| / |D|) D                                      norms of the whole matrix
#
# A block has at most `block` rows and columns; those at the edges are filled with zeros, which change nothing. The
# roots are computed every `every` updates, of L + e l I with l its largest eigenvalue, and the first `start` updates
# are A. More dimensions than two are columns.
#
# All of a matrix's state is on its owner (`shoal.optim.owners`), which makes the update; everything else is AdamW's.


SHAMPOO_OPTIONS = ("precision", "block", "root_eps", "start", "every")
"""Keys of `[optimizer]` that are options of the class."""


def shampoo(config: Shampoo, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedShampoo(
        groups,
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **{name: getattr(config, name) for name in SHAMPOO_OPTIONS},
    )


class OwnedShampoo(WholeOptimizer):
    """Shampoo for the groups that say `whole`, AdamW for the others.

    Args:
        params: Dictionaries with `params` and their options; of plain parameters those of two dimensions are `whole`.
        lr: The learning rate.
        betas: The decay rates of the momentum, and of all squares.
        eps: Added to the denominator of A.
        weight_decay: The decay of weights, apart from the gradient.
        options: `SHAMPOO_OPTIONS`, with the defaults of `[optimizer]`.
    """

    decomposes = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Any,
    ) -> None:
        keys = {name: getattr(Shampoo(), name) for name in SHAMPOO_OPTIONS}
        if unknown := options.keys() - keys.keys():
            raise TypeError(f"OwnedShampoo has no option {sorted(unknown)[0]!r}; it has {', '.join(sorted(keys))}")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **{**keys, **options})
        self.slots = Shampoo(block=self.defaults["block"]).slots

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """What is subtracted, and the state of the next update."""
        gradient, (beta1, beta2) = as_matrix(direction), group["betas"]
        blocks = _blocks(gradient, group["block"])
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state |= {name: torch.zeros_like(direction) for name in ("graft_avg", "graft_avg_sq")}
            for name, side in (("rows", blocks), ("columns", blocks.mT)):
                state |= {f"{of}_{name}": torch.zeros_like(side @ side.mT) for of in ("mean", "root")}
        step = int(counted(state))
        mean, square = as_matrix(state["graft_avg"]), as_matrix(state["graft_avg_sq"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        for name, side in (("rows", blocks), ("columns", blocks.mT)):
            state[f"mean_{name}"].mul_(beta2).add_(_square(side, group), alpha=1 - beta2)
        adam = (mean / (1 - beta1**step)) / (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        if step <= group["start"]:
            return adam.view(direction.shape)
        if step == group["start"] + 1 or step % group["every"] == 0:
            for name in ("rows", "columns"):
                state[f"root_{name}"] = _inverse_fourth_root(state[f"mean_{name}"], group["root_eps"])
        turned = _product(state["root_rows"], _blocks(mean, group["block"]), group)
        turned = _product(turned, state["root_columns"], group)
        found = _joined(turned, gradient.shape)
        length = torch.linalg.vector_norm(found)
        return found.mul_(torch.where(length > 0, torch.linalg.vector_norm(adam) / length, 0.0)).view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations of an update, with its share of the roots."""
        return Shampoo(block=self.defaults["block"], every=self.defaults["every"]).matrix_flops(*sides(shape))


def _blocks(x: Tensor, block: int) -> Tensor:
    """`[block rows, block columns, rows, columns]`, filled with zeros at the edges."""
    own = [min(block, length) for length in x.shape]
    counts = [-(-length // size) for length, size in zip(x.shape, own, strict=True)]
    filled = x.new_zeros([count * size for count, size in zip(counts, own, strict=True)])
    filled[: x.shape[0], : x.shape[1]] = x
    return filled.view(counts[0], own[0], counts[1], own[1]).transpose(1, 2)


def _product(a: Tensor, b: Tensor, group: dict[str, Any]) -> Tensor:
    """Of two matrices, or of stacks of them, in the precision of the group."""
    return product(a, b) if group["precision"] == "parameter" else (a.bfloat16() @ b.bfloat16()).to(a.dtype)


def _square(a: Tensor, group: dict[str, Any]) -> Tensor:
    """a @ a.mT, likewise."""
    wide = a if group["precision"] == "parameter" else a.bfloat16()
    return symmetric_product(wide, wide).to(a.dtype)


def _joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_blocks`."""
    down, across, rows, columns = blocks.shape
    return blocks.transpose(1, 2).reshape(down * rows, across * columns)[: shape[0], : shape[1]].contiguous()


def _inverse_fourth_root(mean: Tensor, eps: float) -> Tensor:
    """(M + e l I)^(-1/4) of each matrix `[..., n, n]`, l its largest eigenvalue; of one that is zero, zero."""
    values, vectors = torch.linalg.eigh(mean)
    largest = values[..., -1:].clamp(min=0)
    powers = (values.clamp(min=0) + eps * largest).pow(-0.25)
    powers = torch.where(largest > 0, powers, 0.0)
    return product(vectors * powers[..., None, :], vectors.mT)


# SOAP (Vyas et al., arXiv:2409.11321, algorithm 3): Adam in the eigenbasis of Shampoo's preconditioners.
#
# For a matrix G of gradients, with both sides' means L, R and their eigenvectors P, Q:
#
#     G' = P^T G Q,     M <- b1 M + (1 - b1) G',     V <- b2 V + (1 - b2) G'^2
#     U = P [ (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps) ] Q^T,     X <- (1 - lr w) X - lr U
#     L <- b L + (1 - b) G G^T,   R <- b R + (1 - b) G^T G
#
# and every `every` updates P <- qr(L P), Q <- qr(R Q), one step of the power iteration, its columns in the order of
# their eigenvalues, V's with them; M is turned from the one basis into the other. (The paper keeps M outside of the
# basis and turns it in every update: the same numbers, two products more.) The first gradient gives L and R, whose
# eigenvectors are computed whole, and no update. A side that is longer than `largest_side` stays as it is. More
# dimensions than two are columns.
#
# All of a matrix's state is on its owner (`shoal.optim.owners`), which makes the update; everything else is AdamW's.


_SIDES = ("rows", "columns")


def soap(config: SOAP, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return OwnedSOAP(
        groups,
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        precision=config.precision,
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
        precision: What products are computed in, "parameter" or "bfloat16".
        shampoo_beta: The decay rate of L and R.
        every: Updates between two changes of the basis.
        largest_side: Sides of more rows or columns stay as they are.
    """

    decomposes = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        precision: str = "parameter",
        shampoo_beta: float = 0.95,
        every: int = 10,
        largest_side: int = 4096,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, precision=precision,
            shampoo_beta=shampoo_beta, every=every, largest_side=largest_side,
        )  # fmt: skip
        self.slots = SOAP(largest_side=largest_side).slots

    def updated(self, group: dict[str, Any], direction: Tensor, state: dict[str, Any]) -> Tensor:
        """U, and the state of the next update."""
        gradient = as_matrix(direction)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state |= {name: torch.zeros_like(direction) for name in ("turned_avg", "turned_avg_sq")}
            _start(gradient, state, group["largest_side"])
            return torch.zeros_like(direction)
        step, (beta1, beta2) = int(counted(state)), group["betas"]
        mean, square = as_matrix(state["turned_avg"]), as_matrix(state["turned_avg_sq"])
        turned = _into_basis(gradient, state, group)
        mean.lerp_(turned, 1 - beta1)
        square.mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        found = _out_of_basis(mean / scale, state, group).div_(1 - beta1**step)
        _follow(gradient, state, group)
        if step % group["every"] == 0:
            _turn(mean, square, state)
        return found.view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations of an update, with its share of a change of the basis."""
        keys = ("largest_side", "every")
        return SOAP(**{key: self.defaults[key] for key in keys}).matrix_flops(*sides(shape))


def _start(gradient: Tensor, state: dict[str, Any], largest: int) -> None:
    for name, side in zip(_SIDES, (gradient, gradient.mT), strict=True):
        if side.shape[0] <= largest:
            state[f"mean_{name}"] = side @ side.mT
            state[f"basis_{name}"] = torch.linalg.eigh(state[f"mean_{name}"])[1].flip(-1).contiguous()


def _into_basis(x: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    x = _product(state["basis_rows"].mT, x, group) if "basis_rows" in state else x
    return _product(x, state["basis_columns"], group) if "basis_columns" in state else x


def _out_of_basis(x: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    x = _product(state["basis_rows"], x, group) if "basis_rows" in state else x
    return _product(x, state["basis_columns"].mT, group) if "basis_columns" in state else x


def _follow(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    beta = group["shampoo_beta"]
    for name, side in zip(_SIDES, (gradient, gradient.mT), strict=True):
        if f"mean_{name}" in state:
            state[f"mean_{name}"].mul_(beta).add_(_square(side, group), alpha=1 - beta)


def _turn(mean: Tensor, square: Tensor, state: dict[str, Any]) -> None:
    """One power iteration of each side. `mean` is turned from the old basis into the new one, and `square` kept in step
    with the order of the columns.
    """
    exactly = {"precision": "parameter"}
    plain = _out_of_basis(mean, state, exactly)
    for dim, name in enumerate(_SIDES):
        if f"mean_{name}" in state:
            basis = state[f"basis_{name}"]
            powers = product(state[f"mean_{name}"], basis)
            order = (basis * powers).sum(0).argsort(descending=True)
            square.copy_(square.index_select(dim, order))
            state[f"basis_{name}"] = torch.linalg.qr(powers[:, order])[0]
    mean.copy_(_into_basis(plain, state, exactly))
