"""Elastic averaging SGD (Zhang, Choromanska, LeCun, arXiv:1412.6651, equations 5 and 6).

Every replica has parameters x_i of its own, and all have the same centre c. Every H steps a spring pulls them together:

    d_i = alpha (x_i - c),     x_i <- x_i - d_i,     c <- c + sum of d_i          alpha = beta / n

The sum of all x_i and c stays the same, so that without gradients nothing is lost. A small beta lets replicas explore.

The centre is the model: evaluations and checkpoints see it after a pull, and the run ends with it, after a last pull. A
checkpoint holds each replica's own parameters too. As many replicas go on from their own; any other number begins at
the centre.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.state import Section
from shoal.sync.config import EASGDConfig
from shoal.sync.flat_copy import FlatCopy, OwnSection
from shoal.sync.meeting import Meeting, device_of, sum_over
from shoal.sync.strategy import Agreed, OwnOptimizer, OwnSteps, Replica, Taken


class EASGDSync(OwnSteps):
    """`Sync` of kind "easgd"."""

    def __init__(self, config: EASGDConfig, mesh: Mesh) -> None:
        self._config, self._replicas = config, mesh.axis("replicate", lane="sync")

    def agreement(self, replica: Replica) -> EASGDAgreement:
        return EASGDAgreement(self._config, replica, self._replicas)


class EASGDAgreement(OwnOptimizer):
    """`Agreement` by a pull every `config.period` steps, over `replicas`: the ranks at this rank's place in each.

    While a replica trains, its parameters are x_i and `_centre` is c; between a pull and the next step the parameters
    are c, and `_x` is x_i.
    """

    def __init__(self, config: EASGDConfig, replica: Replica, replicas: Collective) -> None:
        self.equal = True
        self._config, self._replica, self._replicas = config, replica, replicas
        self._alpha = config.beta / replicas.size
        self._centre, self._x, self._pull = (FlatCopy(replica.owned) for _ in range(3))
        self._meeting, self._device = Meeting(replica, replicas), device_of(replica)
        self._begun = False
        self._own = OwnSection(replicas, self._x)
        self.sections: Sequence[Section] = (self._own,)

    def before_step(self, weight: float = 1.0) -> None:
        """Replicas that have shown the centre go on from what they had."""
        if not self.equal:
            return
        self.equal = False
        self._centre.read()
        if self._begun or self._own.loaded:
            self._x.write()
            self._replica.gather()
        self._begun = True

    def after_update(self, step: int, taken: Taken) -> Agreed | None:
        self._meeting.note(taken)
        if step % self._config.period and step != self._replica.steps:
            return None
        self._x.read()
        for x, centre, pull in zip(self._x.buffers, self._centre.buffers, self._pull.buffers, strict=True):
            torch.sub(x, centre, out=pull).mul_(self._alpha)
            x.sub_(pull)
        sum_over(self._replicas, self._pull.buffers)
        for centre, pull in zip(self._centre.buffers, self._pull.buffers, strict=True):
            centre.add_(pull)
        self._centre.write()
        self._replica.gather()
        self.equal = True
        return self._meeting.hold(self._device)
