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

from shoal.engine.outputs import described, prediction_in
from shoal.errors import UserCodeError

Loss = Callable[[Any, Any], Tensor]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Logits [..., classes] and integer targets [...] to losses [...], in float32 at least.

    Of outputs that hold several things it takes the prediction (`shoal.engine.outputs`).
    """
    logits = prediction_in(outputs)
    if logits is None or logits.ndim != targets.ndim + 1 or logits.shape[:-1] != targets.shape:
        raise UserCodeError(
            f"the model returned {described(outputs)} for targets {_shape(targets)}; cross-entropy needs logits "
            "[*targets, classes]. Return those, or name a loss of your own in [loss]"
        )
    if targets.dtype != torch.int64:
        raise UserCodeError(
            f"targets are {str(targets.dtype).removeprefix('torch.')}; cross-entropy needs integers (int64). For "
            'regression set loss.kind = "squared_error"'
        )
    wide = at_least_float32(logits.flatten(0, -2) if logits.ndim > 1 else logits)
    try:
        return F.cross_entropy(wide, targets.reshape(-1), reduction="none").view(targets.shape)
    except IndexError:
        raise UserCodeError(
            f"targets lie between {int(targets.min())} and {int(targets.max())}, and the model gives logits of "
            f"{logits.shape[-1]} classes; targets must lie between 0 and {logits.shape[-1] - 1} (-100 is left out)"
        ) from None


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    """(prediction - targets)^2, elementwise. The shapes must be equal: broadcasting hides mistakes."""
    prediction = prediction_in(outputs)
    if prediction is None or prediction.shape != targets.shape:
        raise UserCodeError(f"the model returned {described(outputs)} for targets {_shape(targets)}; make them equal")
    return (at_least_float32(prediction) - targets).square()


def weighted_sum(losses: Any, weights: Tensor, *, ones: bool = False) -> Tensor:
    """`sum(losses * weights)`, a scalar; see `weighted_losses`."""
    return weighted_losses(losses, weights, ones=ones).sum()


def weighted_losses(losses: Any, weights: Tensor, *, ones: bool = False) -> Tensor:
    """`losses * weights`, in the shape of `weights`. Dimensions of `losses` behind those of `weights` are averaged.

    Positions of weight 0 do not count, whatever their loss. `ones`: every weight is known to be 1. Raises
    `UserCodeError` for losses of another shape.
    """
    if not isinstance(losses, Tensor) or losses.shape[: weights.ndim] != weights.shape:
        raise UserCodeError(
            f"the loss returned {_shape(losses)} for weights {tuple(weights.shape)}; return one value per sample or "
            "position and average nothing (in PyTorch: reduction='none')"
        )
    losses = at_least_float32(losses)
    if losses.ndim > weights.ndim:
        losses = losses.flatten(weights.ndim).mean(-1)
    if ones:
        return losses
    weights = weights.to(losses.dtype)
    return losses.masked_fill(weights == 0, 0) * weights


def at_least_float32(tensor: Tensor) -> Tensor:
    """Sums of half precision overflow or stall; nothing is summed in less than float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """A tuple of inputs becomes positional arguments, a mapping keywords, anything else the one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _shape(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
