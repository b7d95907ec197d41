"""The loss as a sum: `sum(losses * weights)`, to be divided by the weights of the whole global batch.

A loss is a callable of (outputs, targets) that returns one value per sample or per position and averages nothing.
Then padding (weight 0), microbatches, uneven shares and the number of ranks cannot change what is minimised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import UserCodeError

Loss = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits [..., classes] and integer targets [...] to losses [...], in float32 at least."""
    if not isinstance(outputs, Tensor) or outputs.ndim != targets.ndim + 1 or outputs.shape[:-1] != targets.shape:
        raise UserCodeError(
            f"the model returned {_shape(outputs)} for targets {_shape(targets)}; cross-entropy needs logits "
            "[*targets, classes]. Return those, or name a loss of your own in [loss]"
        )
    logits = outputs.flatten(0, -2) if outputs.ndim > 1 else outputs
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.reshape(-1), reduction="none").view(targets.shape)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """(outputs - targets)^2, elementwise. The shapes must be equal: broadcasting hides mistakes."""
    if not isinstance(outputs, Tensor) or outputs.shape != targets.shape:
        raise UserCodeError(f"the model returned {_shape(outputs)} for targets {_shape(targets)}; make them equal")
    return (outputs - targets.to(outputs.dtype)).square()


def weighted_sum(losses: Any, weights: Tensor) -> Tensor:
    """`sum(losses * weights)`, a scalar. Dimensions of `losses` behind those of `weights` are averaged first.

    Positions of weight 0 do not count, whatever their loss. Raises `UserCodeError` for losses of another shape.
    """
    if not isinstance(losses, Tensor) or losses.shape[: weights.ndim] != weights.shape:
        raise UserCodeError(
            f"the loss returned {_shape(losses)} for weights {tuple(weights.shape)}; return one value per sample or "
            "position and average nothing (in PyTorch: reduction='none')"
        )
    if losses.ndim > weights.ndim:
        losses = losses.flatten(weights.ndim).mean(-1)
    weights = weights.to(losses.dtype)
    return (losses.masked_fill(weights == 0, 0) * weights).sum()


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """A tuple of inputs becomes positional arguments, a mapping keywords, anything else the one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _shape(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
