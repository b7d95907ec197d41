"""What an old contribution is worth. tau is the number of updates made since its worker read the parameters.

    plain        g
    scaled       g / max(1, tau)                       Zhang et al. 2015, arXiv:1511.05950, section 3.2
    compensated  g + strength * g * g * (x - x_old)    DC-ASGD, Zheng et al. 2016, arXiv:1609.08326, equation 10

x are the parameters that the contribution meets and x_old those that it was computed from; the product is elementwise,
and g * g stands for the diagonal of the Hessian. With strength = 0, or x = x_old, "compensated" is "plain".
"""

from __future__ import annotations

from torch import Tensor


def scaled_by_staleness(gradient: Tensor, tau: int) -> Tensor:
    """`gradient` / max(1, tau); itself where that changes nothing."""
    return gradient / tau if tau > 1 else gradient


def compensated(gradient: Tensor, now: Tensor, then: Tensor, *, strength: float) -> Tensor:
    """`gradient` + strength * g * g * (now - then). All have one shape.

    `now` are the parameters that it will update, `then` those that it was computed from.
    """
    return gradient.addcmul(gradient.square(), now - then, value=strength)
