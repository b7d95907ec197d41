"""`Gradients`: from the backward of one replica's rank to the agreed gradient of what this rank's optimizer updates.

    kind              whole on every rank            pieces                       a step sends
    unsummed          parameters, gradients, state   -                            nothing: one rank has all of it
    replicated        parameters, gradients, state   -                            an all-reduce
    sharded, ZeRO-1   parameters, gradients          state                        a reduce-scatter, an all-gather
    sharded, ZeRO-2   parameters                     gradients, state             one reduce-scatter a microbatch, ...
    fully sharded     one unit at a time             parameters, gradients, state ... and two all-gathers for one
    priority          parameters, gradients, state   -                            an all-reduce, most urgent first

Which ranks sum a gradient is the choice of `[sync]`: the ranks of all replicas, or of this one alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shoal.codec.kernels import Kernels, Vectors, load_kernels, vectors_in
from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.gradients.reducer import OwnGradient
from shoal.maths.norm import joint_norm
from shoal.state import Owned, complete, gradients_of, is_counted
from shoal.topology.holding import Ranks

Groups = Callable[[Ranks], Collective]
"""From ranks of the world, ascending, to their group."""


class Tuned(Protocol):
    """What was found out in the first steps, and decides how the run goes on: saved in checkpoints."""

    def to_state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


class Gradients(Protocol):
    """One step calls `start`, then `backward` around each backward (or `schedule` around all of them), then `reduce`;
    after the optimizer's step `gather`.
    """

    @property
    def owned(self) -> Sequence[Owned]:
        """What this rank's optimizer runs on, in the order of the model's parameters."""
        ...

    @property
    def own(self) -> OwnGradient:
        """The norm of what this rank alone computes, if it is wanted."""
        ...

    @property
    def tuned(self) -> Tuned | None:
        """None if everything follows from the run file."""
        ...

    def start(self) -> None:
        """A step begins: the gradients of the last one are gone."""
        ...

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the backward of a microbatch; `last` if no other of this step follows."""
        ...

    def schedule(self) -> AbstractContextManager[None]:
        """Instead of `backward`: around all of a pipeline's schedule, which computes one step."""
        ...

    def reduce(self) -> Tensor:
        """After the last backward: returns when every owned `.grad` is the agreed one.

        The 2-norm of the agreed gradient of the whole model, a scalar, the same bits on every rank that agrees.
        """
        ...

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the agreed gradient."""
        ...

    def gather(self) -> None:
        """After the optimizer's step: returns when the model computes with the updated parameters."""
        ...

    def settle(self) -> None:
        """Between two steps: returns when every update of the last one is made."""
        ...

    def full_parameters(self, *, compares: bool = True) -> AbstractContextManager[None]:
        """Inside, every parameter of the model can be read, and written if all ranks write the same. At the end ranks
        that have pieces compare what they have, if it `compares`: not where one may leave before others, by `break`.
        """
        ...

    def close(self) -> None:
        """Takes its hooks off the model."""
        ...


CLIP_EPS = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm that it divides by."""
ROUNDING = 1e-6
"""Relative: two sums of the same float32 squares, in two orders."""
LEAST_AT_ONCE = 2.0**-20
"""Gradients are measured and multiplied in one pass by no smaller factor, which would lose bits of small numbers."""


def clip_factor(limit: float, norm: float) -> float:
    """What a gradient of this 2-norm is multiplied by, so that it has at most that of the `limit`."""
    return min(1.0, limit / (norm + CLIP_EPS))


@runtime_checkable
class VisibleGradients(Gradients, Protocol):
    """`Gradients` that the code of a script may look at and change, between `reduce` and the optimizer's step."""

    @property
    def used(self) -> frozenset[str]:
        """Before `reduce`: the trained parameters that got a gradient on this rank in this step."""
        ...

    @property
    def divided(self) -> bool:
        """Whether the optimizers of several ranks have pieces of the gradient."""
        ...

    def show_between(self, shown: Mapping[str, Tensor]) -> bool:
        """From now on `.grad` of these parameters is `shown` between two microbatches, and not None: whether it will
        be. Else it is left to the caller, who takes them away before the next backward.
        """
        ...

    def measured(self) -> Tensor:
        """The 2-norm of the owned `.grad` as they are now, that of the whole model, a scalar. Every rank calls it where
        the gradient is divided.
        """
        ...

    def clip(self, limit: float, *, believed: float, written: bool) -> float:
        """Scales the owned `.grad` as they are now down to the 2-norm `limit`, by `clip_factor`; the norm that they
        had. Every rank calls it where the gradient is divided.

        `believed` is the norm that they had when it was last known. Not `written`: no tensor's version says that they
        were written to since, which can still have been done, as through `.data` or NumPy.
        """
        ...

    def expose(self, names: Collection[str]) -> None:
        """After `reduce`: `.grad` is the agreed gradient for code that reads or changes it before the optimizer's step,
        also where the optimizer has pieces; that of parameters that are not in `names` is None.
        """
        ...

    def accept(self) -> None:
        """Before the optimizer's step: what such code has put into `.grad` is what the optimizer sees."""
        ...

    def accept_weights(self) -> None:
        """The same of what it has written into weights (see `script_writes`)."""
        ...


class FlatGradients(NamedTuple):
    """Flat `tensors` that hold gradients at these `addresses`, and nothing else but zeros."""

    tensors: Sequence[Tensor]
    addresses: list[int]

    def has(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these lie there, in this order: none was replaced."""
        return list(map(Tensor.data_ptr, gradients)) == self.addresses


class OverReplica:
    """The part of `VisibleGradients` that is the same wherever the norm adds up over the ranks of a `_replica`. `_flat`
    is where the gradients of `owned` lie after `reduce`, if all of them lie so.
    """

    owned: Sequence[Owned]
    _replica: Collective
    _device: torch.device
    _flat: FlatGradients | None = None

    @property
    def divided(self) -> bool:
        """See `VisibleGradients`."""
        return self._replica.size > 1

    @cached_property
    def _counted_here(self) -> Sequence[Owned]:
        """Those of `owned` that this rank counts, where ranks of its replica hold the same numbers."""
        return [each for each in self.owned if is_counted(each)]

    def measured(self) -> Tensor:
        """See `VisibleGradients`."""
        own = _gradients_in(self.owned)
        return self._norm_now(own, self._in_loops(own))

    def show_between(self, shown: Mapping[str, Tensor]) -> bool:
        """See `VisibleGradients`."""
        return False

    def clip(self, limit: float, *, believed: float, written: bool) -> float:
        """See `VisibleGradients`. What nobody has written is read once: it is multiplied while it is measured."""
        own = _gradients_in(self.owned)
        found, factor = self._in_loops(own), clip_factor(limit, believed)
        at_once = not (written or self.divided) and LEAST_AT_ONCE <= factor < 1.0
        if at_once and found is not None and not found.long:
            now = found.scale_measured(factor)
            if math.isclose(now, believed, rel_tol=ROUNDING):
                return believed
            found.scale(clip_factor(limit, now) / factor)  # written after all; rounded twice
            return now
        now = float(self._norm_now(own, found))
        norm = believed if math.isclose(now, believed, rel_tol=ROUNDING) else now
        if (factor := clip_factor(limit, norm)) < 1.0:
            scale = partial(scale_all, own) if found is None else found.scale
            scale(factor)
        return norm

    def _in_loops(self, own: Sequence[Tensor]) -> InLoops | None:
        """What goes through all of them, where this rank counts all."""
        return InLoops.found(own) if len(self._counted_here) == len(self.owned) else None

    def _norm_now(self, own: Sequence[Tensor], found: InLoops | None) -> Tensor:
        if len(self._counted_here) < len(self.owned):
            norm = norm_of_owned(self._counted_here)
        else:
            norm = _norm_of(own) if found is None else found.norm()
        return global_norm(norm, self._replica, device=self._device)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies what the optimizer sees: what was masked or taken away since `reduce` stays so."""
        found = gradients_of(map(_parameter_of, self.owned))
        if self._flat is not None and complete(found) and self._flat.has(found):
            scale_all(self._flat.tensors, factor)
        elif found := [each for each in found if each is not None]:
            scale_all(found, factor)


class OfWholeParameters(OverReplica):
    """The same, where the optimizer has the model's own parameters."""

    def expose(self, names: Collection[str]) -> None:
        """See `VisibleGradients`."""
        for each in self.owned if len(names) < len(self.owned) else ():
            if each.name not in names:
                each.parameter.grad = None

    def accept(self) -> None:
        """What is in `.grad` is what the optimizer sees."""

    def accept_weights(self) -> None:
        """What is in the weights is what the optimizer sees: nothing to do where its tensors are the model's own."""

    def settle(self) -> None:
        """Nothing is under way between two steps."""

    def full_parameters(self, *, compares: bool = True) -> AbstractContextManager[None]:
        """They are whole."""
        return nullcontext()


_is_sparse, _parameter_of, _place_of = attrgetter("is_sparse"), attrgetter("parameter"), attrgetter("is_cpu", "dtype")
_IN_FLOAT32, _IN_FLOAT64 = (True, torch.float32), (True, torch.float64)


# Many short gradients: PyTorch's call for each takes longer than its numbers do, so one loop in C goes through all that
# are float32 on a CPU (`codec.kernels.vectors_in`). Where PyTorch has several threads, those are its own that are long
# enough to be divided among them.


SPLIT = 1 << 15
"""Of more numbers, PyTorch's kernels give each thread a part (its `GRAIN_SIZE`)."""


class InLoops(NamedTuple):
    """Gradients of which a loop takes the `short` ones, which lie at `vectors`; others are `long`. For the moment in
    which they were `found`: a script may give them other memory.
    """

    kernels: Kernels
    vectors: Vectors
    short: Sequence[Tensor]
    long: Sequence[Tensor]

    @classmethod
    def found(cls, gradients: Sequence[Tensor]) -> InLoops | None:
        """None where no loop is worth it, or can reach them."""
        sizes, short, long = list(map(Tensor.numel, gradients)), gradients, []
        if torch.get_num_threads() > 1 and max(sizes, default=0) > SPLIT:
            short = [each for each, numel in zip(gradients, sizes, strict=True) if numel <= SPLIT]
            long = [each for each, numel in zip(gradients, sizes, strict=True) if numel > SPLIT]
            sizes = [numel for numel in sizes if numel <= SPLIT]
        if any(map(_is_sparse, long)):
            return None
        kernels, vectors = load_kernels(), vectors_in(short, sizes)
        return None if kernels is None or vectors is None else cls(kernels, vectors, short, long)

    def norm(self) -> Tensor:
        """Their joint 2-norm, a float64 scalar."""
        norm = torch.tensor(self.kernels.joint_norm(self.vectors), dtype=torch.float64, device="cpu")
        return torch.hypot(norm, joint_norm(self.long)) if self.long else norm

    def scale_measured(self, factor: float) -> float:
        """Multiplies all of them, of which none is long, in the pass that takes the norm that they had."""
        norm = self.kernels.multiply_measured(self.vectors, factor)
        increment_version(self.short)
        return norm

    def scale(self, factor: float) -> None:
        """Multiplies all of them in place."""
        self.kernels.multiply(self.vectors, factor)
        increment_version(self.short)
        if self.long:
            _scale_each(self.long, factor)


def scale_all(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies all of them in place."""
    found = None if isinstance(factor, Tensor) else InLoops.found(gradients)
    if found is not None and not isinstance(factor, Tensor):
        found.scale(factor)
    elif gradients:
        _scale_each(gradients, factor)


def _scale_each(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """In one call. On a CPU a tensor takes a quarter of the time of a number, of which PyTorch makes a tensor for each
    gradient, and an eighth where it is of their type; a GPU's kernel takes the number. Half types would round it.
    """
    places = set() if isinstance(factor, Tensor) else set(map(_place_of, gradients))
    if places == {_IN_FLOAT32}:
        factor = torch.tensor(factor, dtype=torch.float32)
    elif places == {_IN_FLOAT64}:
        factor = torch.tensor(factor, dtype=torch.float64)
    elif places == {_IN_FLOAT32, _IN_FLOAT64}:  # one type after the other: a scalar would be rounded twice
        for place in places:
            _scale_each([each for each in gradients if _place_of(each) == place], factor)
        return
    torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]


def norm_of_owned(owned: Iterable[Owned]) -> Tensor | None:
    """The 2-norm of all that the optimizer of this rank has of the gradient; None where it has nothing."""
    own = _gradients_in(owned)
    found = InLoops.found(own)
    return _norm_of(own) if found is None else found.norm()


def _gradients_in(owned: Iterable[Owned]) -> list[Tensor]:
    found = gradients_of(map(_parameter_of, owned))
    return found if complete(found) else [gradient for gradient in found if gradient is not None]


def _norm_of(gradients: Sequence[Tensor]) -> Tensor | None:
    if any(map(_is_sparse, gradients)):
        gradients = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
    return joint_norm(gradients) if gradients else None


def global_norm(own: Tensor | None, group: Collective, *, device: torch.device) -> Tensor:
    """The norm of the whole model's gradient, each number counted once: the same bits on every rank of `group`.

        |g| = sqrt(sum over the ranks of |g_r|^2),   g_r the numbers that rank r counts

    `own` is |g_r|; None if this rank counts nothing. Squares are added in float64: that of a float32 number may not fit
    into a float32.
    """
    if group.size == 1:
        return torch.zeros((), device=device) if own is None else own
    square = torch.zeros((), dtype=torch.float64, device=device) if own is None else own.double().square()
    group.all_reduce(square).wait()
    return square.sqrt()


# Gradients of several optimizers, each with parameters of its own: reduced apart, kept and gathered together.


class JointGradients:
    """`Gradients` of `parts`, one for each optimizer. A step begins, computes and reduces each part by itself."""

    tuned = None

    def __init__(self, parts: Sequence[Gradients]) -> None:
        self.parts = parts
        self.owned: Sequence[Owned] = [owned for part in parts for owned in part.owned]

    @property
    def own(self) -> OwnGradient:
        raise UserCodeError("the noise of the gradient is measured with one optimizer; leave observe.noise_* out")

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        raise AssertionError("each part has backwards of its own")

    def schedule(self) -> AbstractContextManager[None]:
        raise AssertionError("a pipeline has one optimizer")

    def reduce(self) -> Tensor:
        raise AssertionError("each part is reduced by itself")

    def scale(self, factor: float | Tensor) -> None:
        for part in self.parts:
            part.scale(factor)

    def gather(self) -> None:
        for part in self.parts:
            part.gather()

    def settle(self) -> None:
        for part in self.parts:
            part.settle()

    @contextmanager
    def full_parameters(self, *, compares: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.full_parameters(compares=compares))
            yield

    def close(self) -> None:
        for part in self.parts:
            part.close()
