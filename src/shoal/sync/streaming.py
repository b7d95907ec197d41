"""Streaming DiLoCo (Douillard et al., arXiv:2501.18512, algorithm 2): a fragment of the model at a time,
while replicas compute on.

With H steps a period, P fragments and a delay of tau steps, fragment p leaves tau steps before step (p + 1) H / P of
every period and is applied there:

    g = mean over k of (x - x_k),    x <- outer step along g,    x_k <- alpha x_k + (1 - alpha) x

x is what all replicas share of the fragment, x_k what replica k has by then, alpha the mixing. Compared to DiLoCo as
many bytes are sent, P times fewer at once, and nobody waits for them unless they need longer than tau steps.

Replicas never become equal. Where a period ends, nothing is on the wire: the x of all fragments together are the
model that evaluations and checkpoints see, and a checkpoint holds each replica's own parameters too. After the last
step the replicas' average is the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.collective import Collective
from shoal.comm.mesh import Mesh
from shoal.state import Owned, Section
from shoal.sync.config import StreamingConfig
from shoal.sync.flat_copy import FlatCopy, OwnSection
from shoal.sync.meeting import Meeting, device_of
from shoal.sync.outer import OuterStep
from shoal.sync.strategy import Agreed, OwnOptimizer, OwnSteps, Replica, Taken


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
