"""Muon (Jordan et al., kellerjordan.github.io/posts/muon, 2024; Liu et al., arXiv:2502.16982), as PyTorch has it:

    m <- mu m + (1 - mu) g,     n = mu m + (1 - mu) g  (Nesterov's form) or m
    x <- (1 - lr w) x - lr s orthogonalised(n)

of matrices; s is 0.2 sqrt(max(rows, columns)) or sqrt(max(1, rows / columns)). More dimensions than two are columns;
of stacked experts each is a matrix, and of rows that belong to heads (`heads`) those of each head. Everything else is
AdamW's.

The momentum lies where the parameter does, and is saved and divided with it. What is orthogonalised is whole on its
owner (`shoal.optim.owners`): each matrix on one rank, and the updates come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.maths.counter import indices, key_of, normal
from shoal.maths.products import product, symmetric_product
from shoal.optim.declared import Dims
from shoal.optim.matrix_kinds import Dion, Muon, dion_rank, followed, muon_scale, orthogonalising_flops, sides
from shoal.optim.owners import WholeOptimizer, as_matrix

# Newton-Schulz iterations: from a matrix to the nearest one whose singular values are all near 1.
#
#     X <- X / |X|_F,     then     X <- Q X,     Q = a I + b G + c G^2,     G = X X^T
#
# acts on every singular value s as a s + b s^3 + c s^5, and leaves singular vectors as they are. With `QUINTIC` small
# values grow 3.4 times in an iteration; all above 0.005 |X|_F lie in 0.68 to 1.14 after five, and stay there (Jordan et
# al., Muon, 2024). With `POLISH`, which is 1 + O((1 - s)^3) near 1, one more iteration brings them to 0.93 to 1.
#
# Where X is much wider than high, G <- Q G Q is followed in its place, and X is multiplied once by the product P of all
# Q: products of small squares instead of large ones. In float32 rounding hides from G what is below 3e-4 of the largest
# singular value; so X is multiplied, and G computed from it, after every `FOLLOWED` iterations, when small values have
# grown 40 times. Results are then as near to those in float64 as without.


QUINTIC = (3.4445, -4.7750, 2.0315)
POLISH = (15 / 8, -10 / 8, 3 / 8)
_TINY = 1e-7

Quintic = tuple[float, float, float]


def orthogonalised(x: Tensor, *, iterations: int = 5, polish: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """The orthogonal factor of each matrix of `x` `[..., rows, columns]`, about; computed in `dtype` (None: its own).

    `iterations`, of which there is one at least, are followed by `polish` iterations with `POLISH`.
    """
    wide = x.to(dtype or x.dtype)
    tall = wide.size(-2) > wide.size(-1)
    wide = wide.mT.contiguous() if tall else wide  # products of its rows want them without gaps
    steps = [*(QUINTIC,) * iterations, *(POLISH,) * polish]
    if wide.dtype.itemsize == 2:
        wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_(min=_TINY)
    if wide.dtype == torch.bfloat16:
        for step in steps:
            wide = _rounded(wide, *step)
        return (wide.mT if tall else wide).to(x.dtype)
    length = 1 if _in_tf32(wide) else followed(*wide.shape[-2:], precision="parameter")
    for first in range(0, len(steps), length):
        factor = _factor(wide, steps[first : first + length], normalise=first == 0)
        is_last = first + length >= len(steps)
        wide = product(wide.mT, factor.mT) if tall and is_last else product(factor, wide)
    return wide.to(x.dtype)


def _in_tf32(x: Tensor) -> bool:
    """Whether products of `x` keep 10 bits of each number: too few to follow the Gram matrix."""
    return x.dtype == torch.float32 and x.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


def _rounded(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """a X + (b G + c G^2) X, as PyTorch's Muon rounds it: 8 bits of Q would lose what is small beside a."""
    plus = torch.addmm if x.ndim == 2 else torch.baddbmm
    gram = x @ x.mT
    return plus(x, plus(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _factor(x: Tensor, steps: Sequence[Quintic], *, normalise: bool) -> Tensor:
    """P, the product of Q in `steps`, for which G is followed. `normalise`: P is that of X / |X|, over |X|, so that X
    itself is not divided; |X|^2 is the trace of G. Where that overflows, P is 0, as X / |X| is then for PyTorch's Muon.
    """
    gram, scale, found = symmetric_product(x, x), None, None
    if normalise:
        scale = 1 / gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt_().clamp_(min=_TINY)[..., None, None]
        gram.mul_(scale * scale).nan_to_num_(0.0, 0.0, 0.0)  # infinity times 0
    for number, (a, b, c) in enumerate(steps):
        q = symmetric_product(gram, gram).mul_(c).add_(gram, alpha=b)
        q.diagonal(dim1=-2, dim2=-1).add_(a)
        found = q if found is None else symmetric_product(q, found)
        if number + 1 < len(steps):
            gram = symmetric_product(symmetric_product(q, gram), q)
    assert found is not None, "there are steps"
    return found if scale is None else found.mul_(scale)


def muon(config: Muon, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
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
        params: Dictionaries with `params` and their options; `whole` says that they are orthogonalised, `heads` to how
            many heads their rows belong, each of which is by itself. Of plain parameters those of two dimensions are.
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
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov,
            newton_schulz=tuple(newton_schulz),  # what torch.load takes from a file without being told to trust it
            adjust=adjust, betas=betas, eps=eps, stacked=False, heads=1,
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
        if group["heads"] > 1:
            matrices = matrices.view(group["heads"], -1, matrices.shape[-1])
        how = NewtonSchulz(*group["newton_schulz"])
        dtype = torch.bfloat16 if how.precision == "bfloat16" else None
        found = orthogonalised(matrices, iterations=how.iterations, polish=how.polish, dtype=dtype)
        scale = muon_scale(group["adjust"], *matrices.shape[-2:])
        return found.mul_(scale).view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations."""
        how = NewtonSchulz(*self.defaults["newton_schulz"])
        iterations = how.iterations + how.polish
        return orthogonalising_flops(*sides(shape), iterations=iterations, precision=how.precision)


# Dion (Ahn et al., arXiv:2504.05295, algorithm 1): orthonormal updates of low rank, by a power iteration that goes
# on from update to update.
#
#     B = M + G,     P = qr(B Q),     R = B^T P,     M <- B - (1 - mu) P R^T,     Q <- R with columns of norm 1
#     X <- (1 - lr w) X - lr sqrt(rows / columns) P Q^T
#
# of matrices `[rows, columns]`, P and Q with r columns. What the rank leaves out stays in M, and comes later. It costs
# some products of a matrix with r columns, and no iterations of whole matrices as Muon's. Q begins with the same
# numbers in every layout. More dimensions than two are columns; everything else is AdamW's.
#
# All of a matrix's state is on its owner (`shoal.optim.owners`), which makes the update.


def dion(config: Dion, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
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

    decomposes = True

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
        left = torch.linalg.qr(product(buffer, state["right_factor"]))[0]
        right = product(buffer.mT, left)
        buffer.addmm_(left, right.mT, alpha=-(1 - group["momentum"]))
        tiny = torch.finfo(right.dtype).tiny
        right = right / right.abs().amax(0, keepdim=True).clamp_(min=tiny)  # or squares leave the range of the type
        state["right_factor"] = right / torch.linalg.vector_norm(right, dim=0, keepdim=True).clamp_(min=tiny)
        return product(left, state["right_factor"].mT).mul_(math.sqrt(rows / columns)).view(direction.shape)

    def cost(self, shape: Dims) -> float:
        """Floating-point operations."""
        return Dion(rank_fraction=self.defaults["rank_fraction"]).matrix_flops(*sides(shape))


def _first_factor(columns: int, rank: int, like: Tensor) -> Tensor:
    """Orthonormal columns that follow from the shape alone."""
    counters = indices((columns, rank), (0, 0), (columns, rank), device=like.device)
    return torch.linalg.qr(normal(key_of(0, "dion"), counters, dtype=torch.float64))[0].to(like.dtype)
