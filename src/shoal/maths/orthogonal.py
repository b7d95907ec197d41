"""Newton-Schulz iterations: from a matrix to the nearest one whose singular values are all near 1.

    X <- X / |X|_F,     then     X <- a X + (b A + c A^2) X,   A = X X^T

acts on every singular value s as a s + b s^3 + c s^5, and leaves singular vectors as they are. With `QUINTIC` small
values grow 3.4 times in an iteration; all above 0.005 |X|_F lie in 0.68 to 1.14 after five, and stay there (Jordan et
al., Muon, 2024). With `POLISH`, which is 1 + O((1 - s)^3) near 1, one more iteration brings them to 0.93 to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
POLISH = (15 / 8, -10 / 8, 3 / 8)
_TINY = 1e-7


def orthogonalised(x: Tensor, *, iterations: int = 5, polish: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """The orthogonal factor of each matrix of `x` `[..., rows, columns]`, about; computed in `dtype` (None: its own).

    `polish` iterations follow with `POLISH`.
    """
    wide = x.to(dtype or x.dtype, copy=True)
    tall = wide.size(-2) > wide.size(-1)
    wide = wide.mT if tall else wide
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_(min=_TINY)
    for a, b, c in (*(QUINTIC,) * iterations, *(POLISH,) * polish):
        gram = wide @ wide.mT
        wide = _plus(wide, _plus(gram, gram, gram, b, c), wide, a, 1.0)
    return (wide.mT if tall else wide).to(x.dtype)


def _plus(added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """beta added + alpha left @ right."""
    product = torch.addmm if added.ndim == 2 else torch.baddbmm
    return product(added, left, right, beta=beta, alpha=alpha)


def orthogonalising_flops(rows: int, columns: int, *, iterations: int) -> float:
    """Of `orthogonalised`: two products with the matrix and one of its Gram matrix in each iteration."""
    short, long = min(rows, columns), max(rows, columns)
    return iterations * (4.0 * short * short * long + 2.0 * short**3)
