"""The reducer: fills buckets with gradients and sends them while the backward still runs.

One scheduler for replicated gradients and for every stage of ZeRO. It takes gradients as they become ready; where the
numbers lie is the bucket's business, and what ranks do with them the exchange's.

Note: how a gradient gets into its bucket
-----------------------------------------
Before a step every `.grad` is None, so that autograd hands over a fresh tensor instead of adding to zeros. The hook
that runs after accumulation copies it into the parameter's slice of the bucket and makes `.grad` that slice; later
microbatches then accumulate straight into the bucket. That is one pass over memory less than zeroing and adding. A
bucket that does not keep its buffer (`keeps`) takes the gradient away instead: `.grad` is None again. The `.grad` that
a script sees is a tensor of its own on that memory: one whose `.data` it replaces is not the bucket's.

Note: short gradients
---------------------
A model has many, and what Python does for each takes longer than its copy. So hooks only note what is ready, until
`TOGETHER_BYTES` of it wait or a bucket is full, and one call copies all of it. Buckets that are lent take each gradient
at once: memory is short there, and a parameter that ZeRO-3 has released is slow to be asked. So are gradients whose
memory something else has, too, as a function's that returns views of one buffer and writes the next layer's into it.

Note: `.grad` between two microbatches
--------------------------------------
It is None, and the sum lies in the bucket alone: a script that calls `zero_grad` after every backward, in whichever
form, does not touch it. The next backward shows autograd the sum again. What a script has put into `.grad` meanwhile
would be part of the gradient in a plain loop, and is refused here. A backward that is not the run's own (`backward`,
`schedule`) leaves its gradients in `.grad`, as without Shoal.

Note: order
-----------
Buckets leave in one fixed order on every rank: a full bucket waits for those before it. Otherwise ranks that use
different parameters would pair different buckets. What the backward did not fill is zero, and leaves when it ends,
before anything else that ranks may tell each other then. Of several reducers that one backward fills, none sends while
it runs (`all_at_the_end`): two ranks may come to their parameters in two orders.

Note: gradients without hooks
-----------------------------
In a pipeline's schedule hooks fire once a microbatch, or not at all where the gradients of weights are computed apart
from those of activations. Inside `schedule()` hooks do nothing, and `finish` takes what lies in `.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.errors import UserCodeError
from shoal.gradients.bucket import Bucket
from shoal.maths.norm import two_norm
from shoal.state import gradients_of

_requires_grad = attrgetter("requires_grad")
_HELD = ContextVar("_HELD", default=False)
TOGETHER_BYTES = 1 << 20
"""Gradients wait for others until they have so many bytes."""
HOLDERS = 2
"""What holds the memory of a gradient that nothing else has: itself, and Python's object of it."""


@contextmanager
def all_at_the_end() -> Iterator[None]:
    """Reducers whose `backward` begins inside send what it fills when it is over."""
    held = _HELD.set(True)
    try:
        yield
    finally:
        _HELD.reset(held)


class OwnGradient:
    """The squared norm of what this rank alone computed, taken from its buckets before they are sent.

    The gradient noise scale is how much parts of a batch disagree. A rank's first microbatch is such a part; behind a
    pipeline's schedule, which does not separate microbatches, all of the rank's samples are. Norms are added up while
    it is open: in a step in which it is wanted, until the first part is over.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._open = False
        self._squares: list[tuple[str, Tensor]] = []

    @property
    def open(self) -> bool:
        """Whether norms are still being taken."""
        return self._open

    def start(self) -> None:
        """A step begins."""
        self._open = self.wanted
        self._squares = []

    def add(self, norms: Iterable[tuple[str, Tensor]]) -> None:
        """Parameters' names, and the 2-norms of their gradients, scalars, that this rank counts."""
        if self._open:
            self._squares += [(name, norm.double().square()) for name, norm in norms]

    def close(self) -> None:
        """The first part is over: what comes is not added."""
        self._open = False

    def squares(self, places: Mapping[str, int], device: torch.device) -> Tensor:
        """Their sums at the `places` of parameters, float64 `[1 + places]`, whose first number is the sum of all; zeros
        where this rank counts nothing or nothing was wanted.
        """
        sums = torch.zeros(1 + max(places.values(), default=0), dtype=torch.float64, device=device)
        if self._squares:
            own = torch.stack([square.to(device) for _, square in self._squares])
            at = [places.get(name, 0) for name, _ in self._squares]
            sums.index_add_(0, torch.tensor(at, device=device), own)
            sums[0] = own.sum()
        return sums


def check_empty(name: str, gradient: Tensor) -> None:
    """Raises `UserCodeError` where a script has left numbers in a gradient before a backward of the run."""
    if bool(gradient.any()):
        raise UserCodeError(
            f"{name}.grad is not empty before run.backward(): a backward() of your own, or code that writes gradients, "
            "has left numbers there, which would be lost. Make them part of the loss that run.backward() gets, or call "
            "zero_grad() after your own backward()"
        )


def _is_shared(gradient: Tensor | None) -> bool:
    """Could something else write into its memory before it is copied?"""
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > HOLDERS


@dataclass
class Reducer:
    """Fills and sends `buckets` with the gradients of `parameters`, which are floating point and dense.

    `eager`: the gradient of every microbatch is sent, not that of the last one alone.
    """

    parameters: Sequence[tuple[str, Parameter]]
    buckets: Sequence[Bucket]
    eager: bool = False
    own: OwnGradient = field(default_factory=OwnGradient)
    used: set[int] = field(default_factory=set, init=False)
    _filled: set[int] = field(default_factory=set, init=False)
    _fired: set[int] = field(default_factory=set, init=False)
    _ready: list[int] = field(default_factory=list, init=False)
    _ready_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._home = {index: bucket for bucket in self.buckets for index in bucket.indices}
        self._of_bucket = [[self.parameters[index][1] for index in bucket.indices] for bucket in self.buckets]
        self._together_bytes = TOGETHER_BYTES if all(bucket.keeps for bucket in self.buckets) else 0
        self._all = [parameter for _, parameter in self.parameters]
        self._sending = self._taking = False
        self._next = 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, (_, p) in enumerate(self.parameters)]

    def start(self) -> None:
        """Forgets the gradients of the step before."""
        for _, parameter in self.parameters:
            parameter.grad = None
        for bucket in self.buckets:
            bucket.start()
        self._filled.clear()
        self.used.clear()
        self.own.start()
        self._begin()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Around the backward of one microbatch. Unless `eager`, only the last of a step sends.

        Raises `UserCodeError` where `.grad` holds what the run has not put there.
        """
        self._begin()
        self._show_sums()
        self._sending, self._taking = (last or self.eager) and not _HELD.get(), True
        try:
            yield
            self._take_ready()
        finally:
            self._sending = self._taking = False
        if last:
            self.flush()
            return
        if self.eager:
            self._send_rest()
        self._look_at(self._filled)
        self.own.close()
        for _, parameter in self.parameters:
            parameter.grad = None  # of an eager reducer: else the next microbatch would be added to this one

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Around all microbatches of a pipeline's schedule. See the note on gradients without hooks."""
        self._begin()
        yield

    def flush(self) -> None:
        """Sends what the backward did not fill. Does not block."""
        self._send_rest()
        self.own.close()

    def finish(self) -> Tensor | None:
        """Sends what the backward did not fill, and waits for all.

        Returns the 2-norm of the numbers that this rank counts, in float32 at least, on the device; None where it has
        no bucket. Each bucket's part is computed while those behind it are still on the wire.
        """
        self.flush()
        for bucket in self.buckets:
            bucket.settle()
        norms: list[Tensor] = []
        for bucket in self.buckets:
            bucket.wait()
            norms.append(bucket.norm())
        return two_norm(torch.stack([norm.to(norms[0].device) for norm in norms])) if norms else None

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    @property
    def used_names(self) -> frozenset[str]:
        """The parameters that got a gradient on this rank in this step."""
        return frozenset(self.parameters[index][0] for index in self.used)

    def _begin(self) -> None:
        self._next, self._ready, self._ready_bytes = 0, [], 0
        self._fired.clear()
        for bucket, parameters in zip(self.buckets, self._of_bucket, strict=True):
            bucket.missing = sum(map(_requires_grad, parameters))

    def _show_sums(self) -> None:
        """Makes `.grad` what autograd is to add to: the sum of the microbatches before, or nothing."""
        if not (self._filled or any(map(is_not, gradients_of(self._all), repeat(None)))):
            return
        for index, (name, parameter) in enumerate(self.parameters):
            if parameter.grad is not None:
                check_empty(name, parameter.grad)
            kept = index in self._filled and self._home[index].keeps
            parameter.grad = self._home[index].slice(index).detach() if kept else None

    def _hook(self, index: int) -> Callable[[Parameter], None]:
        # Python does not see what the hooks of a tensor refer to: with a strong reference, reducer and parameters would
        # keep each other for ever, and with them the buckets and the group of ranks.
        reducer = weakref.ref(self)

        def filled(parameter: Parameter) -> None:
            if (alive := reducer()) is not None and alive._taking:
                alive._filled_by_backward(index, parameter)

        return filled

    def _filled_by_backward(self, index: int, parameter: Parameter) -> None:
        self._ready.append(index)
        self._ready_bytes += parameter.nbytes
        if self._ready_bytes >= self._together_bytes or (index not in self._filled and _is_shared(parameter.grad)):
            self._take_ready()
        if index in self._fired:
            raise UserCodeError(
                f"the gradient of {self.parameters[index][0]} was ready twice in one backward, as it is when a "
                "parameter is used in several reentrant checkpoints; checkpoint with use_reentrant=False"
            )
        self._fired.add(index)
        if self._sending:
            bucket = self._home[index]
            bucket.missing -= 1
            if bucket.missing == 0:
                self._take_ready()
                self._send_full()

    def _take_ready(self) -> None:
        """All that the hooks have noted."""
        if self._ready:
            ready, self._ready, self._ready_bytes = self._ready, [], 0
            self._take(ready)

    def _take(self, indices: Sequence[int]) -> None:
        """Moves these gradients to where they belong: all that nothing was added to yet in one call."""
        taken, gradients, places = [], [], []
        for index in indices:
            parameter, bucket = self._all[index], self._home[index]
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                name = self.parameters[index][0]
                raise UserCodeError(
                    f"the gradient of {name} is sparse; gradients must be dense: build the module with sparse=False"
                )
            self.used.add(index)
            place = bucket.slice(index)
            if gradient.data_ptr() == place.data_ptr():
                continue
            taken.append((parameter, place, bucket.keeps))
            if index in self._filled:
                place.add_(gradient)
                continue
            gradients.append(gradient)
            places.append(place)
            self._filled.add(index)
        if gradients:
            torch._foreach_copy_(places, gradients)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, place, keeps in taken:
            parameter.grad = place.detach() if keeps else None

    def _send_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            bucket = self.buckets[self._next]
            for index in bucket.indices:
                if index not in self._filled:  # frozen since the start
                    self._fill(index, bucket)
            self._send(bucket)

    def _send_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            for index in bucket.indices:
                self._fill(index, bucket)
            self._send(bucket)

    def _fill(self, index: int, bucket: Bucket) -> None:
        self._take([index])
        if index not in self._filled:
            bucket.slice(index).zero_()
            self._all[index].grad = bucket.slice(index).detach() if bucket.keeps else None

    def _look_at(self, indices: Collection[int]) -> None:
        """Takes the norms of gradients that nothing was added to yet, if they are wanted."""
        if self.own.open:
            counted = (index for index in indices if index in self._home[index].counted)
            self.own.add((self.parameters[i][0], two_norm(self._home[i].slice(i))) for i in counted)

    def _send(self, bucket: Bucket) -> None:
        self._look_at(bucket.indices)
        bucket.send()
        self._next += 1
        if self.eager:
            self._filled.difference_update(bucket.indices)
