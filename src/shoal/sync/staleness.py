"""What an old contribution is worth. tau is the number of updates made since its worker read the parameters.

    plain        g
    scaled       g / max(1, tau)                       Zhang et al. 2015, arXiv:1511.05950, section 3.2
    compensated  g + strength * g * g * (x - x_old)    DC-ASGD, Zheng et al. 2016, arXiv:1609.08326, equation 10

x are the parameters that the contribution meets and x_old those that it was computed from; the product is elementwise,
and g * g stands for the diagonal of the Hessian. With strength = 0, or x = x_old, "compensated" is "plain".
"""

from __future__ import annotations

from torch import Tensor


def scale_by_staleness(gradient: Tensor, tau: int) -> None:
    """Divides `gradient` by max(1, tau), in place."""
    if tau > 1:
        gradient.div_(tau)


def compensate_delay(gradient: Tensor, now: Tensor, then: Tensor, *, strength: float) -> None:
    """Adds strength * g * g * (now - then) to `gradient`, in place. All have one shape.

    `now` are the parameters that it will update, `then` those that it was computed from.
    """
    gradient.addcmul_(gradient.square(), now - then, value=strength)
