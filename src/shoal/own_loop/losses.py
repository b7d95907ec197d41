"""What a script's own loop says of its losses: what each is a mean or a sum of, and whether it looks like that.

The gradient of a step is that of one number over the global batch, however the batch is cut into microbatches m:

    "mean"      sum of (n_m / N) loss_m       a mean over samples: n_m of them in m, N in all
    "weighed"   sum of (w_m / W) loss_m       a mean over what the loop counts, such as tokens
    "sum"       sum of loss_m                 a sum over samples

A sum that is taken for a mean over samples is divided by the number of microbatches, a mean that is taken for a sum is
multiplied by it, and in a mean over tokens those of a microbatch with few of them count more: each trains another model
on two ranks than on one, and nothing else shows it. Autograd's graph tells where a loss comes from, so that a loop that
has not said it is warned in its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.engine.loop import PendingStep
from shoal.errors import UserCodeError

LossKind = Literal["mean", "weighed", "sum"]

PASSED_ON = ("AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "SqueezeBackward0", "ToCopyBackward0")
"""Operators behind which each input is a term of the loss."""
OF_WEIGHTS = (
    "Abs", "Pow", "Sqrt", "Exp", "Log", "Log1P", "Clamp", "ClampMin", "ClampMax", "Relu", "Softplus", "Sigmoid", "Tanh",
    "Add", "Sub", "Neg", "Mul", "Div", "View", "UnsafeView", "T", "Transpose", "Permute", "Squeeze", "Unsqueeze", "Cat",
    "Stack", "Sum", "Mean", "Norm", "LinalgVectorNorm", "ToCopy",
)  # fmt: skip
"""Operators that penalties on weights are made of: without a product with anything else."""
NO_WEIGHT = "all weights of the global batch are 0; give one sample weight"
"""Said of a step whose gradient would be divided by 0."""
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


class one_pass:
    """Around the backward of a microbatch, of several losses if `joined`. Raises `UserCodeError` where the loop has
    changed what an earlier one of them needs.
    """

    def __init__(self, *, joined: bool) -> None:
        self._joined = joined

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        changed = isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)
        if self._joined and changed:
            raise UserCodeError(
                "the losses of this batch are computed together, by the backward() without more=True, and something "
                "that an earlier one needs was changed in place meanwhile, as by label.fill_(0): make a new tensor "
                "there"
            ) from error


def doubt(loss: Tensor, samples: int, kind: LossKind = "mean") -> str | None:
    """What speaks against `loss` being a mean over the `samples` of a microbatch, or their sum, as far as its last
    operators tell.
    """
    terms = list(_terms(loss.grad_fn)) if samples > 1 and loss.grad_fn is not None else []
    return _doubt_of_sum(terms) if kind == "sum" else _doubt_of_mean(terms, samples)


class Means(NamedTuple):
    """Over how many numbers the means of a loss are, term by term, in a microbatch of so many `samples`."""

    samples: int
    numbers: list[int]

    def doubt(self, before: Means) -> str | None:
        """What speaks against both being means over samples: a mean over more or fewer numbers, and not for more or
        fewer samples. One of as many for each sample, as over the pixels of images that change their size, is one.
        """
        if len(self.numbers) != len(before.numbers):
            return None
        for now, then in zip(self.numbers, before.numbers, strict=True):
            uneven = now % self.samples or then % before.samples
            if now != then and now * before.samples != then * self.samples and uneven:
                return (
                    f"the loss is a mean over {now} numbers of {self.samples} samples, and was one over {then} of "
                    f"{before.samples} (what a mask selects, tokens, nodes of graphs), and backward() takes it for a "
                    "mean over samples: pass what it is over, backward(loss, weight=...), as in weight=mask.sum()"
                )
        return None


def means_of(loss: Tensor, samples: int) -> Means:
    """Those of `loss`, as far as its last operators tell."""
    terms = [] if loss.grad_fn is None else _terms(loss.grad_fn)
    return Means(samples, [term.numbers for term in terms if term.of == "mean"])


class _Term(NamedTuple):
    """A part of a loss: the sum or mean of `numbers` numbers, times `factor`. `counted`: what it is divided by."""

    of: Literal["sum", "mean", "other"]
    numbers: int = 0
    factor: float = 1.0
    counted: float | None = None


def _doubt_of_mean(terms: Iterable[_Term], samples: int) -> str | None:
    for term in terms:
        by_samples = bool(term.counted) and term.counted % samples == 0  # "batchmean", times the weight of a term
        if term.of == "sum" and term.numbers >= samples and term.factor * samples > 1.5 and not by_samples:
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


def _doubt_of_sum(terms: Collection[_Term]) -> str | None:
    """A mean that is multiplied by something may have been made a sum."""
    if all(term.of == "mean" for term in terms) and any(term.factor == 1.0 for term in terms):
        return (
            'the loss is a mean, and reduction="sum" adds up those of all microbatches: leave reduction out for the '
            "mean over the global batch, or compute the loss as a sum over samples"
        )
    return None


def _terms(node: Any) -> Iterator[_Term]:
    """What is behind `node` when nothing but factors and other terms stands before."""
    open_nodes: list[tuple[Any, float, float | None]] = [(node, 1.0, None)]
    for _ in range(MOST_NODES):
        if not open_nodes:
            return
        node, factor, counted = open_nodes.pop()
        name, following = node.name(), [each for each, _ in node.next_functions if each is not None]
        by = _number(_saved(node, "other")) if name.startswith(("MulBackward", "DivBackward")) else None
        if name in PASSED_ON or _keeps_number(node, name):
            open_nodes += [(each, factor, counted) for each in reversed(following)]
        elif following and by is not None:
            times = name[0] == "M"
            open_nodes.append((following[0], factor * by if times else factor / by, counted if times else by))
        else:
            yield _term_of(node, name, factor, counted)


def _term_of(node: Any, name: str, factor: float, counted: float | None) -> _Term:
    """The sum or mean that `node` takes, as far as it can be looked at."""
    reduction = getattr(node, "_saved_reduction", None)
    if name == "SumBackward0":
        numbers, of = prod(node._saved_self_sym_sizes), [each for each, _ in node.next_functions if each is not None]
        of_losses = _are_stacked(of, numbers)
        return _Term("other" if of_losses or _is_of_weights(of, numbers) else "sum", numbers, factor, counted)
    if name == "MeanBackward0":
        return _Term("mean", prod(node._saved_self_sym_sizes), factor)
    if name in ("NllLossBackward0", "NllLoss2DBackward0"):
        targets, total = _saved(node, "target"), _saved(node, "total_weight")
        if targets is None or total is None:
            return _Term("other")
        numbers = targets.numel()
        return _Term("sum", numbers, factor) if reduction == SUM else _Term("mean", numbers, factor, float(total))
    own = None if reduction is None else _saved(node, "self")
    return _Term("other") if own is None else _Term("sum" if reduction == SUM else "mean", own.numel(), factor)


def _are_stacked(nodes: list[Any], numbers: int) -> bool:
    """Whether that many numbers were put side by side, as losses of several tasks are before they are weighed."""
    open_nodes = list(nodes)
    for _ in range(MOST_NODES):
        if not open_nodes:
            return False
        node = open_nodes.pop()
        if node.name() == "StackBackward0" and len(node.next_functions) == numbers:
            return True
        if node.name().split("Backward")[0] in ("Add", "Sub", "Mul", "Div", "Neg"):
            open_nodes += [each for each, _ in node.next_functions if each is not None]
    return False


def _is_of_weights(nodes: list[Any], numbers: int) -> bool:
    """Whether `numbers` numbers come from trained weights alone, each from one of its own: a penalty, without data."""
    open_nodes, found = list(nodes), dict[int, int]()
    for _ in range(MOST_NODES):
        if not open_nodes:
            return 0 < numbers <= sum(found.values())
        node = open_nodes.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable.numel()
            continue
        kind, following = node.name().split("Backward")[0], [each for each, _ in node.next_functions]
        constant = None in following and kind in ("Mul", "Div")
        if kind not in OF_WEIGHTS or (constant and _number(_saved(node, "other")) is None):
            return False
        open_nodes += [each for each in following if each is not None]
    return False


def _saved(node: Any, name: str) -> Any:
    """What `node` has saved for its backward, a tensor or number; None where that was freed, or must be fetched, as
    from another device: a hook that fetches may do so only once.
    """
    with suppress(RuntimeError):  # the graph has been freed, or what it holds was changed in place
        raw = getattr(node, f"_raw_saved_{name}", None)
        return getattr(node, f"_saved_{name}", None) if raw is None or raw.unpack_hook is None else None


def factor_of(loss: Tensor, node: Any) -> float | None:
    """By what the number that `node` of autograd's graph has computed was multiplied to make `loss`, without its sign;
    None where it was not made in this way alone.
    """
    at, factor = loss.grad_fn, 1.0
    while at is not node:
        if at is None:
            return None
        name, following = at.name(), [each for each, _ in at.next_functions if each is not None]
        by = _number(_saved(at, "other")) if name.startswith(("MulBackward", "DivBackward")) else None
        passes = by is not None or name in PASSED_ON or _keeps_number(at, name)
        if len(following) != 1 or not passes:
            return None
        factor = factor if by is None else factor * by if name[0] == "M" else factor / by
        (at,) = following
    return factor


def _keeps_number(node: Any, name: str) -> bool:
    """Whether it copies its input, or is the mean or sum of one number, as loops for `nn.DataParallel` take it."""
    if name in ("CloneBackward0", "UnsqueezeBackward0"):
        return True
    return name in ("MeanBackward0", "SumBackward0") and len(node._saved_self_sym_sizes) == 0


def _number(value: Any) -> float | None:
    """The size of a factor or divisor that is one number, is not trained, and is not 0."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
        return None
    return None if value is None else abs(float(value)) or None


class AutocastWatch:
    """Whether the next forwards of `models` run under autocast, as `precision` has it, by hooks that `left_out` takes
    off.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device, precision: str) -> None:
        self.precision = precision
        seen = self._seen = set[bool]()  # all that a hook holds: a copy of the model takes its hooks along

        def see(module: nn.Module, inputs: object) -> None:
            seen.add(torch.is_autocast_enabled(device.type))

        self._hooks = [model.register_forward_pre_hook(see) for model in models]

    def left_out(self) -> bool:
        """Has every forward run without it? Not where none was seen."""
        for hook in self._hooks:
            hook.remove()
        return self._seen == {False}


class Place(NamedTuple):
    """Where a loop is when it calls `backward`: in which step and microbatch, for which of its optimizers."""

    step: int
    microbatch: str
    optimizer: int


class Doubts:
    """What a loop is warned of in its first step: of a loss that does not look like what it is taken for, and of a
    forward outside of autocast, where `autocasts` watches for one. Each once, by `warn`. What a loss is a mean over
    takes two microbatches to see, and so a second step where the first has one.
    """

    def __init__(self, warn: Callable[[str], None], autocasts: AutocastWatch | None) -> None:
        self._warn, self._autocasts = warn, autocasts
        self._first: int | None = None  # the step in which losses are looked at; 0 when one was warned of
        self._place, self._losses = Place(0, "", 0), 0
        self._means: dict[tuple[int, int], Means | None] = {}  # by optimizer and backward; None: compared

    def look(
        self, loss: Tensor, kind: LossKind, place: Place, pending: PendingStep | None, samples_of: Callable[[], int]
    ) -> None:
        """`loss` is that of a microbatch at `place`, of whose step `pending` says more. `samples_of` counts its
        samples, for which the host waits for a GPU: it is called for the first microbatches alone.
        """
        if self._autocasts is not None:
            self._look_at_autocast(self._autocasts)
        self._losses = self._losses + 1 if place == self._place else 0
        self._place, which = place, (place.optimizer, self._losses)
        first = place.step if self._first is None else self._first
        if kind == "weighed" or not (place.step == first or (first > 0 and self._means.get(which) is not None)):
            return
        self._first, samples = first, samples_of()
        if pending is None or samples >= pending.samples:
            return
        found = doubt(loss, samples, kind)
        if samples > 0 and kind == "mean":
            now, before = means_of(loss, samples), self._means.get(which)
            self._means[which] = now if which not in self._means else None
            found = found if found is not None or before is None else now.doubt(before)
        if found is None:
            return
        self._first = 0
        self._warn(f"step {pending.number}: {found}. As it is, the result depends on the number of ranks")

    def _look_at_autocast(self, watch: AutocastWatch) -> None:
        self._autocasts = None
        if watch.left_out():
            self._warn(
                f'precision.kind = "{watch.precision}", and the forward runs outside of run.autocast(), in float32: '
                "put `with run.autocast():` around the forward and its loss"
            )
