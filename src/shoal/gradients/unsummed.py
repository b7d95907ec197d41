"""Gradients of a rank that has nobody to sum them with: they stay where autograd puts them.

Without an exchange there is no bucket to fill, and so no copy and no hook. Autograd hands over a fresh tensor where
`.grad` is None, and adds to it in later microbatches. What a plain loop does stays as cheap here as it is there.

Between two microbatches of a step `.grad` of every parameter is None: the sum is kept here, and goes back before the
next backward. A script's `zero_grad` cannot wipe it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.gradients.gradients import OfWholeParameters, global_norm
from shoal.gradients.reducer import OwnGradient, check_empty
from shoal.maths.norm import JointNorm, two_norm
from shoal.state.ownership import Owned, Trained, owned_whole


class UnsummedGradients(OfWholeParameters):
    """`Gradients` of the `trained` parameters, each of which this rank alone sums. The norm adds up over `replica`."""

    tuned = None

    def __init__(self, trained: Sequence[Trained], *, replica: Collective) -> None:
        self.owned: Sequence[Owned] = [owned_whole(t) for t in trained]
        self.own = OwnGradient()
        self._trained, self._replica = trained, replica
        self._parameters = [t.parameter for t in trained]
        self._counted = [index for index, t in enumerate(trained) if t.holding.counts]
        counted = [self._parameters[index] for index in self._counted]
        self._norm = JointNorm(counted) if counted else None
        self._device = trained[0].parameter.device if trained else torch.device("cpu")
        self._sums: list[Tensor | None] | None = None
        self._gradients: list[Tensor] = []

    def start(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._sums, self._gradients = None, []
        self.own.start()

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        self._give_back()
        yield
        if self.own.open:
            self._look()
        if not last:
            self._sums = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def schedule(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self) -> Tensor:
        self._gradients = self._filled()
        if self.own.open:
            self._look()
        own = None if self._norm is None else self._norm([self._gradients[index] for index in self._counted])
        return global_norm(own, self._replica, device=self._device)

    def scale(self, factor: float | Tensor) -> None:
        if self._gradients:
            torch._foreach_mul_(self._gradients, factor)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def used(self) -> frozenset[str]:
        return frozenset(t.holding.name for t in self._trained if t.parameter.grad is not None)

    def gather(self) -> None:
        """Every parameter is whole here."""

    def close(self) -> None:
        """There are no hooks."""

    def _give_back(self) -> None:
        """What earlier microbatches have added up."""
        for trained in self._trained:
            if trained.parameter.grad is not None:
                check_empty(trained.holding.name, trained.parameter.grad)
                trained.parameter.grad = None
        if self._sums is not None:
            for parameter, gradient in zip(self._parameters, self._sums, strict=True):
                parameter.grad = gradient
            self._sums = None

    def _filled(self) -> list[Tensor]:
        """The gradient of every parameter; zero where the backward came to none. Raises for one that is sparse."""
        found = []
        for trained, parameter in zip(self._trained, self._parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                raise UserCodeError(
                    f"the gradient of {trained.holding.name} is sparse; gradients must be dense: build the module with "
                    "sparse=False"
                )
            found.append(gradient)
        return found

    def _look(self) -> None:
        """The first part of this rank's samples is over: takes its norm."""
        counted = [self._parameters[index].grad for index in self._counted]
        self.own.add(two_norm(gradient) for gradient in counted if gradient is not None)
        self.own.close()
