"""`MomentumCorrected`: a coded sum of velocities instead of gradients, as Deep Gradient Compression asks.

    g_r <- g_r min(1, c / (sqrt(n) |g_r|))        local clipping
    u_r <- m u_r + g_r                            momentum correction
    c_r  = u_r + e_r,   sent as by `Coded`
    u_r <- 0 where something was sent             factor masking; so no stale direction is sent once more. Not
                                                  of a rank alone, which has plain momentum

(Lin et al., "Deep Gradient Compression", arXiv:1712.01887, sections 3.1 to 3.3.) The optimizer that takes the sum has
no momentum of its own. Clipping is by the norm of a buffer, not of the whole gradient, which is not there yet when it
is sent. Both u and e count when their step has led to an update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded_momentum import CodedMomentum
from shoal.comm.exchanges.exchange import Segment
from shoal.maths.norm import two_norm


class MomentumCorrected(CodedMomentum):
    """`Coded` with error feedback, of velocities with `momentum`; gradients of the whole group are clipped to
    `clip_norm`, each rank's to its share. Other arguments are passed on.
    """

    def __init__(
        self,
        codec: Codec,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        *,
        momentum: float,
        clip_norm: float | None,
        **others: object,
    ) -> None:
        super().__init__(codec, group, buffer, segments, **others)
        self._momentum = momentum
        self._limit = math.inf if clip_norm is None else clip_norm / math.sqrt(group.size)
        self._masked: Tensor | None = None

    def send(self, buffer: Tensor) -> None:
        gradient = buffer.to(self._dtype)
        norm = float(two_norm(gradient)) if self._limit < math.inf else 0.0
        factor = self._limit / norm if norm > self._limit else 1.0
        torch.mul(self.velocity, self._momentum, out=self._next_velocity).add_(gradient, alpha=factor)
        whole = self._next_velocity if self.residual is None else torch.add(self._next_velocity, self.residual)
        super().send(self._next_velocity)
        self._masked = None
        if self.group.size > 1 and self._next is not None:  # a rank alone sends all to itself: plain momentum
            self._masked = self._next != whole  # before a second round adds what it could not send

    def wait(self) -> None:
        was_sent = self._sent
        super().wait()
        if was_sent and self._masked is not None:
            self._next_velocity.masked_fill_(self._masked, 0.0)

    def commit(self) -> None:
        if self._sent:
            self._velocity, self._next_velocity = self._next_velocity, self._velocity
        super().commit()
