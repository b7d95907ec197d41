"""`Sync`: how replicas agree. The engine calls these and knows nothing else of other replicas' parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Sync(Protocol):
    """One strategy, for one model, on one generation of the membership."""

    def start(self) -> None:
        """A step begins: the gradients of the last one are gone."""
        ...

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the backward of a microbatch; `last` where no other of this step follows."""
        ...

    def gradients(self) -> Tensor:
        """After the last backward: returns when every `.grad` is the agreed one.

        The 2-norm of the agreed gradient, a scalar, the same bits on every rank that agrees.
        """
        ...

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the agreed gradient."""
        ...

    def parameters(self) -> None:
        """After the optimizer step: returns when every parameter is the agreed one."""
        ...

    def close(self) -> None:
        """Lets go of the model."""
        ...
