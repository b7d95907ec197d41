"""Local steps and an outer optimizer: local SGD (arXiv:1805.09767), DiLoCo (arXiv:2311.08105), SlowMo
(arXiv:1910.00643), AdaComm (arXiv:1810.08313), Adasum (arXiv:2006.02924).

Replica k starts a round at the parameters x that all replicas share, takes H steps of its own to x_k, and then all take
one step of the outer optimizer (`outer`) along the mean of x - x_k, and go on from the new x. Replicas send H times
fewer bytes, and a slow link holds them up once in H steps. `period` says when a round is over. Optimizer state inside
replicas stays their own. Replicas may be split inside: each rank agrees on its own pieces.

Persistent buffers, such as running statistics, are averaged with the parameters. After the last step of the run there
is an agreement, however long the round was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError
from shoal.state import Held, Section
from shoal.sync.config import LocalConfig
from shoal.sync.flat_copy import MOMENTUM, SYNC, FlatCopy
from shoal.sync.meeting import Meeting, device_of
from shoal.sync.outer import OuterStep
from shoal.sync.period import LinkPace, Period
from shoal.sync.strategy import Agreed, OwnOptimizer, OwnSteps, Replica, Taken


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
