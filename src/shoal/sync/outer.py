"""The outer optimizer: SGD, with momentum, on what replicas changed since they last agreed.

    g = mean over k of (x - x_k)          the outer gradient: x where the round began, x_k where replica k has come,
                                          weighted by the samples that it took there
    m = mu m + g                          the outer momentum
    x = x - lr (g + mu m)                 Nesterov; without it x - lr m

(DiLoCo, arXiv:2311.08105, algorithm 1.) SlowMo (arXiv:1910.00643, algorithm 1) counts its momentum in units of the
inner learning rate, gamma: g / gamma goes into m, and gamma lr m comes out.

The mean is an exchange between replicas: as it is, or with a codec, which then codes outer gradients. In its place
there may be the adaptive sum of x - x_k (`shoal.comm.exchanges.adasum`), in which all replicas count the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.adasum import Adasum
from shoal.comm.exchanges.exchange import Exchange, NewExchange
from shoal.state import Owned, numbers_on
from shoal.sync.config import OuterKeys
from shoal.sync.flat_copy import FlatCopy
from shoal.sync.strategy import Replica


class OuterStep:
    """The outer optimizer of the tensors `owned`. `start` is where the round began, `momentum` None without one.

    A step is `send`, `arrive` and `apply`; steps of the replica may lie between the first two. `adaptive`: g is the
    adaptive sum.
    """

    def __init__(
        self,
        config: OuterKeys,
        replica: Replica,
        replicas: Collective,
        owned: Sequence[Owned],
        *,
        adaptive: bool = False,
    ) -> None:
        self.start = FlatCopy(owned)
        self.momentum = FlatCopy(owned) if config.outer_momentum else None
        self._config, self._replicas, self._change = config, replicas, FlatCopy(owned)
        self._divisor = 1 if adaptive else replicas.size
        exchange: NewExchange = Adasum if adaptive else replica.exchange
        self._exchanges: list[Exchange] = [
            exchange(replicas, buffer, segments)
            for buffer, segments in zip(self._change.buffers, self._change.segments, strict=True)
        ]
        self.start.read()

    def send(self, *, weight: float | None = None) -> None:
        """Starts to sum what replicas changed. `weight`: what this replica's samples of the round weigh; None: as much
        as those of any other.
        """
        self._change.read()
        share = 1.0 if weight is None or self._divisor == 1 else self._share(weight)
        for exchange, change, start in zip(self._exchanges, self._change.buffers, self.start.buffers, strict=True):
            torch.sub(start, change, out=change)
            if share != 1.0:
                change.mul_(share)
            exchange.start()
            exchange.send(change)
            exchange.settle()

    def _share(self, weight: float) -> float:
        """The weight of this replica beside the mean weight."""
        total = numbers_on(self.start.buffers[0].device, [weight])
        self._replicas.all_reduce(total).wait()
        whole = float(total)
        return weight * self._replicas.size / whole if whole else 1.0  # none counts: all alike

    def arrive(self) -> None:
        """Returns when the outer gradient is there."""
        for exchange, change in zip(self._exchanges, self._change.buffers, strict=True):
            exchange.wait()
            exchange.commit()
            change /= self._divisor

    def apply(self, *, unit: float = 1.0, plain: bool = False) -> None:
        """`start` takes the outer step; parameters stay. `unit`: that of the momentum, SlowMo's gamma. `plain`: the
        mean of the replicas, which leaves the momentum as it is.
        """
        for index, (start, change) in enumerate(zip(self.start.buffers, self._change.buffers, strict=True)):
            momentum = None if plain or self.momentum is None else self.momentum.buffers[index]
            start.sub_(self._step(change, momentum, unit) if not plain else change)

    def _step(self, change: Tensor, momentum: Tensor | None, unit: float) -> Tensor:
        config = self._config
        if momentum is None:
            return config.outer_lr * change
        momentum.mul_(config.outer_momentum).add_(change / unit)
        if config.nesterov:
            return config.outer_lr * (change + unit * config.outer_momentum * momentum)
        return config.outer_lr * unit * momentum
