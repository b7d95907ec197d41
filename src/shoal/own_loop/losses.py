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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, Literal, NamedTuple

from torch import Tensor

from shoal.data.sample import Batch
from shoal.engine.compute import Microbatch
from shoal.engine.updates import Work
from shoal.errors import UserCodeError

LossKind = Literal["mean", "weighed", "sum"]

PASSED_ON = ("AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "SqueezeBackward0", "ToCopyBackward0")
"""Operators behind which each input is a term of the loss."""
MOST_NODES = 10_000
"""So much of a graph is looked at."""
SUM = 2
"""What `reduction="sum"` is called in the graph."""


def kind_of(weight: float | None, reduction: str) -> LossKind:
    """Raises `UserCodeError` for a reduction that is none, and for a sum that is weighed."""
    if reduction not in ("mean", "sum"):
        raise UserCodeError(f'backward(reduction={reduction!r}): a loss is a "mean" over samples, or their "sum"')
    if reduction == "sum" and weight is not None:
        raise UserCodeError("backward() has a weight for a sum; a weight says what a mean is over: leave one out")
    return "sum" if reduction == "sum" else "mean" if weight is None else "weighed"


def as_number(value: float | Tensor) -> float:
    """A measurement that a script hands over, whatever graph hangs on it."""
    return float(value.detach() if isinstance(value, Tensor) else value)


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


class OpenStep:
    """One step while the loop is at it, with so many `optimizers`: which microbatch, and what its samples weigh."""

    def __init__(self, work: Work, batches: Sequence[Batch], *, scale: float, optimizers: int) -> None:
        self.work, self.batches = work, batches
        self._scale, self._index, self._optimizers = scale, -1, optimizers
        self.updates, self.begun, self._committed = 0, False, True
        """How many optimizers have made their update in this step; whether a microbatch was given."""
        self._microbatch: Microbatch | None = None

    @property
    def microbatch(self) -> Microbatch:
        assert self._microbatch is not None, "a microbatch has been entered"
        return self._microbatch

    @property
    def is_last(self) -> bool:
        return self._index == len(self.batches) - 1

    @property
    def place(self) -> str:
        """Which microbatch it is, in words."""
        return f"microbatch {self._index + 1} of {len(self.batches)}"

    def factor(self, kind: LossKind = "mean") -> float:
        """What a loss of weight 1 is multiplied by before the backward, as far as it is known."""
        return self._scale / self.work.tally.wait().denominator if kind == "mean" else self._scale

    def updated(self, *, committed: bool) -> bool:
        """An optimizer has made its update: whether it was the last, and all of them are `committed`."""
        self.updates, self._committed = self.updates + 1, self._committed and committed
        return self._committed and self.updates == self._optimizers

    def enter(self, index: int, microbatch: Microbatch) -> None:
        self._index, self._microbatch, self.begun = index, microbatch, True


def counted(loss: Tensor, counts: float) -> float | Tensor:
    """`loss` x `counts` in float64: a number, where that is no wait for a device."""
    return float(loss) * counts if loss.is_cpu else loss.double().reshape(()) * counts


def counts_of(microbatch: Microbatch, weight: float | None, kind: LossKind) -> float:
    """What the loss of a microbatch is multiplied by, beside the factor of its step: 0 for a copy of samples."""
    batch = microbatch.batch
    if kind == "mean":  # the sum of ones is known without a look at the device
        return float(batch.weights.numel()) if microbatch.ones else batch.weights.sum().item()
    return (1.0 if weight is None else float(weight)) if batch.real_samples else 0.0


def doubt(loss: Tensor, samples: int) -> str | None:
    """What speaks against `loss` being a mean over the `samples` of a microbatch, as far as its last operators tell."""
    for term in _terms(loss.grad_fn) if samples > 1 and loss.grad_fn is not None else ():
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


def _terms(node: Any) -> Iterator[_Term]:
    """The sums and means behind `node` that nothing but factors and other terms stands before."""
    open_nodes: list[tuple[Any, float, float | None]] = [(node, 1.0, None)]
    for _ in range(MOST_NODES):
        if not open_nodes:
            return
        node, factor, counted = open_nodes.pop()
        name, following = node.name(), [each for each, _ in node.next_functions if each is not None]
        if name in PASSED_ON:
            open_nodes += [(each, factor, counted) for each in reversed(following)]
        elif name.startswith(("MulBackward", "DivBackward")):
            if following and (by := _number(_saved(node, "other"))) is not None:
                times = name[0] == "M"
                open_nodes.append((following[0], factor * by if times else factor / by, counted if times else by))
        elif (term := _term_of(node, name, factor, counted)) is not None:
            yield term


def _term_of(node: Any, name: str, factor: float, counted: float | None) -> _Term | None:
    """The sum or mean that `node` takes; None where it is none, or cannot be looked at."""
    reduction = getattr(node, "_saved_reduction", None)
    if name == "SumBackward0":
        of_losses = any(each is not None and each.name() == "StackBackward0" for each, _ in node.next_functions)
        return None if of_losses else _Term(prod(node._saved_self_sym_sizes), factor, counted)
    if name in ("NllLossBackward0", "NllLoss2DBackward0"):
        targets, total = _saved(node, "target"), _saved(node, "total_weight")
        if targets is None or total is None:
            return None
        return _Term(targets.numel(), factor) if reduction == SUM else _Term(targets.numel(), 0.0, float(total))
    own = None if reduction is None else _saved(node, "self")
    return None if own is None else _Term(own.numel(), factor if reduction == SUM else 0.0)


def _saved(node: Any, name: str) -> Any:
    """What `node` has saved for its backward, a tensor or number; None where that was freed, or must be fetched, as
    from another device: a hook that fetches may do so only once.
    """
    with suppress(RuntimeError):  # the graph has been freed, or what it holds was changed in place
        raw = getattr(node, f"_raw_saved_{name}", None)
        return getattr(node, f"_saved_{name}", None) if raw is None or raw.unpack_hook is None else None


def _number(value: Any) -> float | None:
    """The size of a factor or divisor that is one number, is not trained, and is not 0."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
        return None
    return None if value is None else abs(float(value)) or None
