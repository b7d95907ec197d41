"""`MomentumSum`: a coded sum of momenta instead of gradients, as 1-bit Adam, 0/1 Adam and 1-bit LAMB ask.

    exact update    g = sum over r of g_r,  m <- b m + (1 - b) g           the optimizer gets g
    others          c_r = b m / n + (1 - b) g_r + e_r                      this rank's share of the new momentum
                    m <- sum over r of decode(encode(c_r))                 the optimizer gets m
                    e_r <- c_r - decode(encode(c_r))

(Tang et al., "1-bit Adam", arXiv:2102.02888, algorithm 1.) The momentum is linear in the gradient, so that its error
can be fed back; Adam's step is not, and error feedback of gradients fails with it. Each rank holds m / n, of which only
the sum over ranks counts. Residuals wait while gradients are sent as they are. Which updates are exact is a function of
their number, which the optimizer counts likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective
from shoal.comm.exchanges.coded_momentum import CodedMomentum
from shoal.comm.exchanges.coded_sum import as_it_is
from shoal.comm.exchanges.exchange import Segment


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
