"""What a script's own loop says of its losses: what each is a mean or a sum of, and what a microbatch of it counts.

The gradient of a step is that of one number over the global batch, however the batch is cut into microbatches m:

    "mean"      sum of (n_m / N) loss_m       a mean over samples: n_m of them in m, N in all
    "weighed"   sum of (w_m / W) loss_m       a mean over what the loop counts, such as tokens
    "sum"       sum of loss_m                 a sum over samples

A sum that is taken for a mean over samples is divided by the number of microbatches, and in a mean over tokens those of
a microbatch with few of them count more: either trains another model on two ranks than on one, and nothing else shows
it. Autograd's graph tells where a loss comes from, so that a loop that has not said it is warned in its first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shoal.engine.compute import Microbatch
from shoal.errors import UserCodeError

LossKind = Literal["mean", "weighed", "sum"]

PASSED_ON = ("AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "SqueezeBackward0", "ToCopyBackward0")
"""Operators behind which each input is a term of the loss."""
SUM = 2
"""What `reduction="sum"` is called in the graph."""


def kind_of(weight: float | None, reduction: str) -> LossKind:
    """Raises `UserCodeError` for a reduction that is none, and for a sum that is weighed."""
    if reduction not in ("mean", "sum"):
        raise UserCodeError(f'backward(reduction={reduction!r}): a loss is a "mean" over samples, or their "sum"')
    if reduction == "sum" and weight is not None:
        raise UserCodeError("backward() has a weight for a sum; a weight says what a mean is over: leave one out")
    return "sum" if reduction == "sum" else "mean" if weight is None else "weighed"


def check_loss(loss: Any) -> None:
    """Raises `UserCodeError` for what has no gradient."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
    what = "without a gradient" if isinstance(loss, Tensor) and loss.numel() == 1 else what
    raise UserCodeError(f"the loss is {what}; backward() takes a scalar tensor that depends on the model")


@contextmanager
def one_pass(*, joined: bool) -> Iterator[None]:
    """Around the backward of a microbatch, of several losses if `joined`. Raises `UserCodeError` where the loop has
    changed what an earlier one of them needs.
    """
    try:
        yield
    except RuntimeError as error:
        if not joined or "modified by an inplace operation" not in str(error):
            raise
        raise UserCodeError(
            "the losses of this batch are computed together, by the backward() without more=True, and something that "
            "an earlier one needs was changed in place meanwhile, as by label.fill_(0): make a new tensor there"
        ) from error


def as_number(value: float | Tensor) -> float:
    """A measurement that a script hands over, whatever graph hangs on it."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def counts_of(microbatch: Microbatch, weight: float | None, kind: LossKind) -> float:
    """What the loss of a microbatch is multiplied by, beside the factor of its step: 0 for a copy of samples."""
    batch = microbatch.batch
    if kind == "mean":  # the sum of ones is known without a look at the device
        return float(batch.weights.numel()) if microbatch.ones else batch.weights.sum().item()
    return (1.0 if weight is None else float(weight)) if batch.real_samples else 0.0


def doubt(loss: Tensor, samples: int) -> str | None:
    """What speaks against `loss` being a mean over the `samples` of a microbatch, as far as its last operators tell."""
    for term in _terms(loss.grad_fn, 1.0) if samples > 1 else ():
        if term.numbers >= samples and term.factor * samples > 1.5:
            return (
                "the loss looks like a sum over the samples of a microbatch, and backward() takes it for their mean: "
                'pass reduction="sum" for the sum over the global batch, or divide the loss by its samples'
            )
        if term.counted is not None and term.counted != term.numbers and term.counted % samples:
            return (
                f"the loss is a mean over {term.counted:g} of {term.numbers} numbers (a mask, ignore_index, weights of "
                "classes), and backward() takes it for a mean over samples: pass what it is over, backward(loss, "
                "weight=...), as in weight=(targets != -100).sum()"
            )
    return None


class _Term(NamedTuple):
    """A part of a loss that adds up `numbers` numbers, times `factor`; `counted`: what it is divided by."""

    numbers: int
    factor: float
    counted: float | None = None


def _terms(node: Any, factor: float, counted: float | None = None) -> Iterator[_Term]:
    """The sums and means behind `node` that nothing but factors and other terms stands before."""
    if node is None:
        return
    name, following = node.name(), [each for each, _ in node.next_functions]
    if name in PASSED_ON:
        for each in following:
            yield from _terms(each, factor, counted)
    elif name.startswith(("MulBackward", "DivBackward")):
        if (by := _number(node._saved_other)) is not None:
            yield from _terms(following[0], *((factor * by, counted) if name[0] == "M" else (factor / by, by)))
    elif name == "SumBackward0":
        if following[0] is not None and following[0].name() != "StackBackward0":  # of several losses, each a number
            yield _Term(prod(node._saved_self_sym_sizes), factor, counted)
    elif name in ("NllLossBackward0", "NllLoss2DBackward0"):
        numbers, summed = node._saved_target.numel(), node._saved_reduction == SUM
        yield _Term(numbers, factor if summed else 0.0, None if summed else float(node._saved_total_weight))
    elif (reduction := getattr(node, "_saved_reduction", None)) is not None:
        sizes = node._saved_self.numel() if getattr(node, "_saved_self", None) is not None else 0
        yield _Term(sizes, factor if reduction == SUM else 0.0)


def _number(value: Any) -> float | None:
    """The size of a factor or divisor that is one number, is not trained, and is not 0."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
        return None
    return None if value is None else abs(float(value)) or None
