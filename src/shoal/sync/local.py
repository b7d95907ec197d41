"""Local steps and an outer optimizer: local SGD (arXiv:1805.09767) and DiLoCo (arXiv:2311.08105, algorithm 1).

Replica k starts a round at the parameters x that all replicas share, takes H steps of its own to x_k, and then

    g = mean over k of (x - x_k)          the outer gradient, one all-reduce
    m = mu m + g                          the outer momentum
    x = x - lr (g + mu m)                 Nesterov; without it x - lr m

and every replica goes on from the new x. Replicas send H times fewer bytes, and a slow link holds them up once in H
steps. Optimizer state inside replicas stays their own. Replicas may be split inside: each rank agrees on its own
pieces.

Persistent buffers, such as running statistics, are averaged with the parameters. After the last step of the run there
is an agreement, however long the round was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import AllReduce, NewExchange
from shoal.comm.mesh import Mesh
from shoal.state.ownership import Owned
from shoal.state.section import Section
from shoal.state.target import Held, views
from shoal.sync.config import LocalConfig
from shoal.sync.strategy import Agreed, OwnOptimizer, Replica
from shoal.topology.axes import INSIDE_REPLICA, Axis
from shoal.topology.holding import Holding, Ranks

PREFIX = "sync/momentum/"


class LocalSync:
    """`Sync` of kind "local"."""

    lockstep_axes: tuple[Axis, ...] = INSIDE_REPLICA
    exchange: NewExchange = AllReduce
    keeps_replicas_equal = False

    def __init__(self, config: LocalConfig, mesh: Mesh) -> None:
        self._config, self._replicas = config, mesh.axis("replicate", lane="sync")

    def gradient_ranks(self, holding: Holding) -> Ranks:
        return holding.inside

    def agreement(self, replica: Replica) -> LocalAgreement:
        return LocalAgreement(self._config, replica, self._replicas)


class LocalAgreement(OwnOptimizer):
    """`Agreement` every `config.period` steps, over `replicas`: the ranks at this rank's place in each of them."""

    def __init__(self, config: LocalConfig, replica: Replica, replicas: Collective) -> None:
        self.equal = True
        self._config, self._replica, self._replicas = config, replica, replicas
        self._parts = [_Part(owned, momentum=config.outer_momentum > 0) for owned in replica.owned]
        self._stop, self._tokens = False, 0
        self.sections: Sequence[Section] = (_MomentumSection(self._parts),) if config.outer_momentum else ()

    def before_step(self) -> None:
        if self.equal:
            for part in self._parts:
                part.remember()
            self.equal = False

    def after_update(self, step: int, *, stop: bool, tokens: int) -> Agreed | None:
        self._stop, self._tokens = self._stop or stop, self._tokens + tokens
        warming_up = step <= self._config.warmup_steps
        if not (warming_up or step % self._config.period == 0 or step == self._replica.steps):
            return None
        self._average_changes()
        for part in self._parts:
            part.move(self._config, plain=warming_up)
        self._replica.gather()
        self._average_buffers()
        agreed = self._share()
        self.equal, self._stop, self._tokens = True, False, 0
        return agreed

    def _average_changes(self) -> None:
        """Every part's change becomes the mean over the replicas."""
        for dtype in dict.fromkeys(part.change.dtype for part in self._parts):
            parts = [part for part in self._parts if part.change.dtype == dtype]
            flat = torch.cat([part.take_change().flatten() for part in parts])
            self._replicas.all_reduce(flat).wait()
            flat /= self._replicas.size
            for part, change in zip(parts, flat.split([part.change.numel() for part in parts]), strict=True):
                part.change.copy_(change.view_as(part.change))

    def _average_buffers(self) -> None:
        for buffer in self._replica.buffers:
            mean = buffer.double()
            self._replicas.all_reduce(mean).wait()
            buffer.copy_(mean / self._replicas.size)

    def _share(self) -> Agreed:
        shared = torch.tensor([float(self._stop), float(self._tokens)], dtype=torch.float64)
        if self._parts:
            shared = shared.to(self._parts[0].change.device)
        self._replicas.all_reduce(shared).wait()
        stop, tokens = shared.tolist()
        return Agreed(stop > 0, int(tokens))


class _Part:
    """One owned tensor: where the round began, how far it moved, and the outer momentum."""

    def __init__(self, owned: Owned, *, momentum: bool) -> None:
        self.owned = owned
        self.start = owned.parameter.detach().clone()
        self.change = torch.zeros_like(self.start)
        self.momentum = torch.zeros_like(self.start) if momentum else None

    def remember(self) -> None:
        """A round begins here."""
        self.start.copy_(self.owned.parameter.detach())

    def take_change(self) -> Tensor:
        """x - x_k."""
        return torch.sub(self.start, self.owned.parameter.detach(), out=self.change)

    @torch.no_grad()
    def move(self, config: LocalConfig, *, plain: bool) -> None:
        """The outer step from where the round began; `plain`: the average."""
        step, lr = self.change, 1.0 if plain else config.outer_lr
        if self.momentum is not None and not plain:
            self.momentum.mul_(config.outer_momentum).add_(self.change)
            step = self.momentum
            if config.nesterov:
                step = self.change + config.outer_momentum * self.momentum
        self.owned.parameter.copy_(self.start - lr * step)


class _MomentumSection:
    """The outer momentum in a checkpoint, under the names and boxes of the unsplit model."""

    name = "sync"

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def tensors(self) -> dict[str, Held]:
        """`sync/momentum/<parameter>`."""
        found: dict[str, list[Any]] = {}
        for part in self._parts:
            assert part.momentum is not None, "without momentum there is no section"
            regions = ((region.box, region.start) for region in part.owned.regions)
            targets = views(part.momentum, regions, global_shape=part.owned.holding.global_shape)
            found.setdefault(f"{PREFIX}{part.owned.name}", []).extend(targets)
        return dict(found)

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """None of them if the run that saved had no outer momentum: it then begins at zero."""
        return self.tensors() if any(name.startswith(PREFIX) for name in saved) else {}

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Every rank has its own pieces; the names are those of the whole model."""
        return {name for name in saved if name.startswith(PREFIX)}

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, facts: Mapping[str, Any]) -> None:
        """There are no facts."""
