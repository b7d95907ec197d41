"""Statistics that a model gathers while it trains, such as the running means of batch normalisation.

They are a part of the step, not of the forward: a step that is skipped must leave none, a step that is accumulated
must count once, and every replica must end with the same. So a layer only adds up what it sees, and the engine
commits the sum over all replicas once a step:

    forward, forward, ...                          each adds to the layer's sums
    total = all_reduce(layer.step_sums())          over the replicas
    layer.commit_sums(total)                       or layer.discard_sums() when the step is skipped
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class StepStatistics(Protocol):
    """A module with statistics that are agreed once a step."""

    def step_sums(self) -> Tensor:
        """What was gathered since the last commit or discard, to be summed: float64, flat, of a fixed length."""
        ...

    def commit_sums(self, total: Tensor) -> None:
        """Takes `total`, the sum of all replicas' `step_sums()`, into the model's buffers, and starts anew."""
        ...

    def discard_sums(self) -> None:
        """Starts anew without a trace of what was gathered."""
        ...
