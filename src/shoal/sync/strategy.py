"""`Sync`: how replicas agree. The engine calls these and knows nothing else of other replicas' parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from shoal.sync.owned import Owned


class Sync(Protocol):
    """One strategy, for one model, on one generation of the membership."""

    @property
    def owned(self) -> Sequence[Owned]:
        """What this rank's optimizer runs on, in the order of the model's parameters."""
        ...

    def start(self) -> None:
        """A step begins: the gradients of the last one are gone."""
        ...

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the backward of a microbatch; `last` where no other of this step follows."""
        ...

    def schedule(self) -> AbstractContextManager[None]:
        """Instead of `backward`: around all of a pipeline's schedule, which computes one step."""
        ...

    def gradients(self) -> Tensor:
        """After the last backward: returns when every owned `.grad` is the agreed one.

        The 2-norm of the agreed gradient of the whole model, a scalar, the same bits on every rank that agrees.
        """
        ...

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the agreed gradient."""
        ...

    def parameters(self) -> None:
        """After the optimizer step: returns when the model computes with the agreed parameters."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every parameter of the model can be read, and written where all ranks write the same."""
        ...

    def close(self) -> None:
        """Lets go of the model."""
        ...
