"""Gradients of several optimizers, each with parameters of its own: reduced apart, kept and gathered together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor

from shoal.errors import UserCodeError
from shoal.gradients.gradients import Gradients
from shoal.gradients.reducer import OwnGradient
from shoal.state.ownership import Owned


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
    def full_parameters(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.full_parameters())
            yield

    def close(self) -> None:
        for part in self.parts:
            part.close()
