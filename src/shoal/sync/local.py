"""Local steps and an outer optimizer: local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105), SlowMo
(arXiv:1910.00643), AdaComm (arXiv:1810.08313), Adasum (arXiv:2006.02924).

Replica k starts a round at the parameters x that all replicas share, takes H steps of its own to x_k, and then all take
one step of the outer optimizer (`outer`) along the mean of x - x_k, and go on from the new x. Replicas send H times
fewer bytes, and a slow link holds them up once in H steps. When a round is over says `period`. Optimizer state inside
replicas stays their own. Replicas may be split inside: each rank agrees on its own pieces.

Persistent buffers, such as running statistics, are averaged with the parameters. After the last step of the run there
is an agreement, however long the round was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.adasum import Adasum
from shoal.comm.exchanges.exchange import Exchange, NewExchange
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.state import Held, Owned, Section, numbers_on
from shoal.sync.config import LocalConfig, OuterKeys, StreamingConfig
from shoal.sync.flat_copy import MOMENTUM, SYNC, FlatCopy, Meeting, OwnSection, device_of
from shoal.sync.period import LinkPace, Period
from shoal.sync.strategy import Agreed, OwnOptimizer, OwnSteps, Replica, Taken

# The outer optimizer: SGD, with momentum, on what replicas changed since they last agreed.
#
#     g = mean over k of (x - x_k)          the outer gradient: x where the round began, x_k where replica k has come,
#                                           weighted by the samples that it took there
#     m = mu m + g                          the outer momentum
#     x = x - lr (g + mu m)                 Nesterov; without it x - lr m
#
# (DiLoCo, arXiv:2311.08105, algorithm 1.) SlowMo (arXiv:1910.00643, algorithm 1) counts its momentum in units of the
# inner learning rate, gamma: g / gamma goes into m, and gamma lr m comes out.
#
# The mean is an exchange between replicas: as it is, or with a codec, which then codes outer gradients. In its place
# there may be the adaptive sum of x - x_k (`shoal.comm.exchanges.adasum`), in which all replicas count the same.


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


class LocalSync(OwnSteps):
    """`Sync` of kind "local"."""

    def __init__(self, config: LocalConfig, mesh: Mesh) -> None:
        self._config, self._replicas = config, mesh.axis("replicate", lane="sync")

    def agreement(self, replica: Replica) -> LocalAgreement:
        return LocalAgreement(self._config, replica, self._replicas)


class LocalAgreement(OwnOptimizer):
    """`Agreement` when a period is over, over `replicas`: the ranks at this rank's place in each of them."""

    def __init__(self, config: LocalConfig, replica: Replica, replicas: Collective) -> None:
        self.equal = True
        self._config, self._replica = config, replica
        self._outer = OuterStep(config, replica, replicas, replica.owned, adaptive=config.merge == "adasum")
        self._meeting, self._device = Meeting(replica, replicas), device_of(replica)
        self._period = Period(config.first_period, adapt_every=config.adapt_every, moves=config.moves_period)
        self._pace = LinkPace(config, replicas, self._device, rounds=replica.rounds) if config.wait_share else None
        self._rates: list[float] = []
        self._weight = 0.0
        self.sections: Sequence[Section] = (_LocalSection(self._outer.momentum, self._period),)

    def before_step(self, weight: float = 1.0) -> None:
        if self.equal:
            self._outer.start.read()
            self.equal = False

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        self._meeting.note(taken)
        self._note_rate(taken.lr)
        self._weight += taken.weight
        warming_up = step <= self._config.warmup_steps
        if not (warming_up or self._period.due(step) or step == self._replica.steps):
            return None
        steps = self._meeting.steps
        if self._pace is not None:
            self._pace.begin()
        self._outer.send(weight=self._weight)
        self._outer.arrive()
        self._outer.apply(unit=self._unit(), plain=warming_up)
        self._outer.start.write()
        self._replica.gather()
        agreed = self._meeting.hold(self._device)
        self._period.agreed(step, loss=self._meeting.loss, lr=1.0 if taken.lr is None else taken.lr)
        if self._pace is not None:
            self._period.follow(self._pace.end(step, steps))
        self.equal, self._weight = True, 0.0
        self._rates.clear()
        return agreed

    def take_figures(self) -> Mapping[str, float]:
        """How many steps the replicas take until they agree again, where that may change."""
        return {"sync/period": float(self._period.period)} if self._config.moves_period else {}

    def _unit(self) -> float:
        """The mean learning rate of the round, in which SlowMo counts its momentum. A rate of 0 has changed nothing."""
        mean = sum(self._rates) / len(self._rates) if self._rates else 0.0
        return mean if mean > 0 else 1.0

    def _note_rate(self, lr: float | None) -> None:
        if not self._config.per_lr:
            return
        if lr is None:
            raise ConfigError(
                "sync.per_lr = true: the momentum counts in units of the learning rate, and the optimizer's groups "
                "have rates of their own; leave per_lr out"
            )
        self._rates.append(lr)


class _LocalSection:
    """The outer momentum in a checkpoint, under the names and boxes of the unsplit model; and where the period is."""

    name = "sync"

    def __init__(self, momentum: FlatCopy | None, period: Period) -> None:
        self._momentum, self._period = momentum, period

    def tensors(self) -> dict[str, Held]:
        """`sync/momentum/<parameter>`."""
        return {} if self._momentum is None else self._momentum.held(MOMENTUM)

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """None of them if the run that saved had no outer momentum: it then begins at zero."""
        return self.tensors() if any(name.startswith(MOMENTUM) for name in saved) else {}

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Every rank has its own pieces, of the whole model; another strategy may have saved more."""
        return {name for name in saved if name.startswith(SYNC)}

    def facts(self) -> dict[str, Any]:
        return self._period.to_state()

    def load(self, facts: Mapping[str, Any]) -> None:
        self._period.load(facts)


# Streaming DiLoCo (Douillard et al., arXiv:2501.18512, algorithm 2): a fragment of the model at a time, while replicas
# compute on.
#
# With H steps a period, P fragments and a delay of tau steps, fragment p leaves tau steps before step (p + 1) H / P of
# every period and is applied there:
#
#     g = mean over k of (x - x_k),    x <- outer step along g,    x_k <- alpha x_k + (1 - alpha) x
#
# x is what all replicas share of the fragment, x_k what replica k has by then, alpha the mixing. Compared to DiLoCo as
# many bytes are sent, P times fewer at once, and nobody waits for them unless they need longer than tau steps.
#
# Replicas never become equal. Where a period ends, nothing is on the wire: the x of all fragments together are the
# model that evaluations and checkpoints see, and a checkpoint holds each replica's own parameters too. After the last
# step the replicas' average is the model.


class StreamingSync(OwnSteps):
    """`Sync` of kind "streaming"."""

    def __init__(self, config: StreamingConfig, mesh: Mesh) -> None:
        self._config, self._replicas = config, mesh.axis("replicate", lane="sync")

    def agreement(self, replica: Replica) -> StreamingAgreement:
        return StreamingAgreement(self._config, replica, self._replicas)


class StreamingAgreement(OwnOptimizer):
    """`Agreement` by fragments, over `replicas`: the ranks at this rank's place in each of them."""

    def __init__(self, config: StreamingConfig, replica: Replica, replicas: Collective) -> None:
        self.equal = True
        self._config, self._replica = config, replica
        self._fragments = [
            _Fragment(config, OuterStep(config, replica, replicas, owned), FlatCopy(owned))
            for owned in fragments_of(replica.owned, config.fragments)
        ]
        self._x = FlatCopy(replica.owned)
        self._meeting, self._device = Meeting(replica, replicas), device_of(replica)
        self._begun = False
        momenta = [fragment.outer.momentum for fragment in self._fragments if fragment.outer.momentum is not None]
        self._own = OwnSection(replicas, self._x, shared=momenta)
        self.sections: Sequence[Section] = (self._own,)

    def before_step(self, weight: float = 1.0) -> None:
        """Replicas that have shown the model go on from what they had."""
        if not self.equal:
            return
        self.equal = False
        for fragment in self._fragments:
            fragment.outer.start.read()
        if self._begun or self._own.loaded:
            self._x.write()
            self._replica.gather()
        self._begun = True

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        self._meeting.note(taken)
        last, place = step == self._replica.steps, step % self._config.period or self._config.period
        applied = False
        for number, fragment in enumerate(self._fragments):
            applies_at = (number + 1) * (self._config.period // self._config.fragments)
            if place == applies_at - self._config.delay:
                fragment.outer.send()
                fragment.on_wire = True
            if fragment.on_wire and (last or place == applies_at):
                fragment.apply()
                applied = True
        if not last and place != self._config.period:
            if applied:
                self._replica.gather()
            return None
        self._x.read()
        for fragment in self._fragments:
            if last:
                fragment.average()
            fragment.outer.start.write()
        self._replica.gather()
        self.equal = True
        return self._meeting.hold(self._device)


class _Fragment:
    """One fragment: its outer optimizer, and whether its outer gradient is on the wire."""

    def __init__(self, config: StreamingConfig, outer: OuterStep, own: FlatCopy) -> None:
        self.outer, self.on_wire = outer, False
        self._mixing, self._own = config.mixing, own

    def apply(self) -> None:
        """The outer step, and the parameters mixed with its result."""
        self.outer.arrive()
        self.outer.apply()
        self.on_wire = False
        self._own.read()
        for own, shared in zip(self._own.buffers, self.outer.start.buffers, strict=True):
            torch.lerp(shared, own, self._mixing, out=own)
        self._own.write()

    def average(self) -> None:
        """What is shared becomes the mean of the replicas' parameters."""
        self.outer.send()
        self.outer.arrive()
        self.outer.apply(plain=True)


def fragments_of(owned: Sequence[Owned], number: int) -> list[list[Owned]]:
    """`number` fragments of whole tensors, about equally large: the largest first, each to the smallest fragment."""
    found: list[list[Owned]] = [[] for _ in range(number)]
    sizes = [0] * number
    for one in sorted(owned, key=lambda one: -one.parameter.numel()):
        smallest = sizes.index(min(sizes))
        found[smallest].append(one)
        sizes[smallest] += one.parameter.numel()
    return found
