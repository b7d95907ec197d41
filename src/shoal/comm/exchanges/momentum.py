"""Coded sums of momenta instead of gradients, as Deep Gradient Compression and 1-bit Adam ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded import Coded
from shoal.comm.exchanges.coded_sum import as_it_is
from shoal.comm.exchanges.exchange import Segment
from shoal.maths.norm import two_norm

# `CodedMomentum`: what coded sums of momenta have in common: a velocity of each rank, beside its residual.
#
# A velocity moves, like a residual, when its step has led to an update, and is saved and restored in the same way: when
# the world changes, a rank takes over those of several others, and adds them up.


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


# `MomentumCorrected`: a coded sum of velocities instead of gradients, as Deep Gradient Compression asks.
#
#     g_r <- g_r min(1, c / (sqrt(n) |g_r|))        local clipping
#     u_r <- m u_r + g_r                            momentum correction
#     c_r  = u_r + e_r,   sent as by `Coded`
#     u_r <- 0 where something was sent             factor masking; so no stale direction is sent once more. Not
#                                                   of a rank alone, which has plain momentum
#
# (Lin et al., "Deep Gradient Compression", arXiv:1712.01887, sections 3.1 to 3.3.) The optimizer that takes the sum has
# no momentum of its own. Clipping is by the norm of a buffer, not of the whole gradient, which is not there yet when it
# is sent. Both u and e count when their step has led to an update.


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


# `MomentumSum`: a coded sum of momenta instead of gradients, as 1-bit Adam, 0/1 Adam and 1-bit LAMB ask.
#
#     exact update    g = sum over r of g_r,  m <- b m + (1 - b) g           the optimizer gets g
#     others          c_r = b m / n + (1 - b) g_r + e_r                      this rank's share of the new momentum
#                     m <- sum over r of decode(encode(c_r))                 the optimizer gets m
#                     e_r <- c_r - decode(encode(c_r))
#
# (Tang et al., "1-bit Adam", arXiv:2102.02888, algorithm 1.) The momentum is linear in the gradient, so that its error
# can be fed back; Adam's step is not, and error feedback of gradients fails with it. Each rank holds m / n, of which
# only the sum over ranks counts. Residuals wait while gradients are sent as they are. Which updates are exact is a
# function of their number, which the optimizer counts likewise.


class MomentumSum(CodedMomentum):
    """`Coded` of momenta that decay by `beta`; `exact` says of an update, counted from 1, whether its gradient is sent
    as it is. `velocity` is this rank's share of the momentum. Other arguments are passed on.
    """

    def __init__(
        self,
        codec: Codec,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        *,
        beta: float,
        exact: Callable[[int], bool],
        **others: object,
    ) -> None:
        super().__init__(codec, group, buffer, segments, **others)
        self._beta, self._exact, self._plain = beta, exact, as_it_is(group, buffer)
        self._is_exact = True

    def start(self) -> None:
        super().start()
        self._is_exact = self._exact(self.updates + 1)

    def send(self, buffer: Tensor) -> None:
        if self._is_exact:
            self.rounds += 1
            self._sent = True
            self._plain.send(buffer, residual=False, key=0)
            return
        torch.mul(self.velocity, self._beta, out=self._next_velocity).add_(buffer, alpha=1 - self._beta)
        super().send(self._next_velocity)

    def settle(self) -> None:
        if not self._is_exact:
            super().settle()

    def wait(self) -> None:
        if not self._sent:
            return
        if not self._is_exact:
            super().wait()
            torch.div(self.result, self.group.size, out=self._next_velocity)
            return
        self._plain.wait()
        torch.mul(self.velocity, self._beta, out=self._next_velocity)
        self._next_velocity.add_(self.result, alpha=(1 - self._beta) / self.group.size)

    def commit(self) -> None:
        if not self._sent:
            return
        self._velocity, self._next_velocity = self._next_velocity, self._velocity
        if self._is_exact:
            self._sent = False
            self.updates += 1
        else:
            super().commit()
