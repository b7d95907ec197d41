"""`CodedMomentum`: what coded sums of momenta have in common: a velocity of each rank, beside its residual.

A velocity moves, like a residual, when its step has led to an update, and is saved and restored in the same way: when
the world changes, a rank takes over those of several others, and adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded import Coded
from shoal.comm.exchanges.exchange import Segment


class CodedMomentum(Coded):
    """`Coded` of what is made with `velocity`. A subclass writes the next one to `_next_velocity`, and exchanges the
    two in `commit`.
    """

    def __init__(
        self, codec: Codec, group: Collective, buffer: Tensor, segments: Sequence[Segment], **others: object
    ) -> None:
        super().__init__(codec, group, buffer, segments, **others)  # pyright: ignore[reportArgumentType]
        self._velocity, self._next_velocity = (torch.zeros_like(buffer, dtype=self._dtype) for _ in range(2))
        self._velocity_arrivals: list[Tensor] = []

    @property
    def velocity(self) -> Tensor:
        """This rank's, `[numel]`."""
        while self._velocity_arrivals:
            self._velocity.add_(self._velocity_arrivals.pop())
        return self._velocity

    def velocity_arrival(self) -> Tensor:
        """A tensor `[numel]` of zeros; what is written into it is added to the velocity before that is next used."""
        self._velocity_arrivals.append(torch.zeros_like(self._velocity))
        return self._velocity_arrivals[-1]

    def _unsent(self) -> Sequence[tuple[Tensor | None, Callable[[], Tensor]]]:
        return [*super()._unsent(), (self.velocity, self.velocity_arrival)]
