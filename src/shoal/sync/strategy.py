"""`Sync`: how replicas agree. The engine calls these and knows nothing else of other replicas' parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from shoal.comm.buckets.own_gradient import OwnGradient
from shoal.sync.owned import Owned


class Remembered(Protocol):
    """What a checkpoint holds of a sync, so that a run goes on bitwise."""

    def to_state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...


class Sync(Protocol):
    """One strategy, for one model, on one generation of the membership."""

    @property
    def owned(self) -> Sequence[Owned]:
        """What this rank's optimizer runs on, in the order of the model's parameters."""
        ...

    @property
    def own(self) -> OwnGradient:
        """The norm of what this rank alone computes, where it is wanted."""
        ...

    @property
    def remembered(self) -> Remembered | None:
        """None where it follows from the run file alone."""
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

    def settle(self) -> None:
        """Between two steps: returns when every update of the last one is made."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Inside, every parameter of the model can be read, and written where all ranks write the same."""
        ...

    def close(self) -> None:
        """Lets go of the model."""
        ...
