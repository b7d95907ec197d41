"""The parameters of each replica in a checkpoint, for strategies under which replicas never become equal.

`model/...` is the one model that such a strategy shows to evaluations and saves: the replicas' average, or a centre.
`sync/replica-<number>/x/<parameter>` is what replica `number` itself goes on with, `sync/replica-<number>/<scalar>` are
its numbers. As many replicas as saved go on from their own; any other number begins at the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.state.target import Held
from shoal.sync.flat_copy import FlatCopy

SYNC = "sync/"
MOMENTUM = f"{SYNC}momentum/"
_NAME = re.compile(rf"{SYNC}replica-(\d+)/")


class OwnSection:
    """The section of one replica's own `x`, and of float64 `scalars` of it; `shared` are outer momenta, equal on all.

    `loaded` says whether a checkpoint was read into them.
    """

    name = "sync"

    def __init__(
        self,
        replicas: Collective,
        x: FlatCopy,
        *,
        scalars: Mapping[str, Tensor] | None = None,
        shared: Sequence[FlatCopy] = (),
    ) -> None:
        self._replicas, self._x, self.loaded = replicas, x, False
        self._scalars, self._shared = dict(scalars or {}), shared

    def tensors(self) -> dict[str, Held]:
        """This replica's own, and what is shared."""
        prefix = f"{SYNC}replica-{self._replicas.rank}/"
        own = self._x.held(f"{prefix}x/") | {f"{prefix}{name}": scalar for name, scalar in self._scalars.items()}
        return own | self._shared_tensors()

    def targets(self, saved: Mapping[str, torch.dtype]) -> dict[str, Held]:
        """What this replica had, if there were as many replicas; what is shared in any case."""
        self.loaded = replicas_in(saved) == self._replicas.size
        held = self.tensors() if self.loaded else self._shared_tensors()
        return {name: targets for name, targets in held.items() if name in saved}

    def elsewhere(self, saved: Mapping[str, torch.dtype]) -> set[str]:
        """Every rank has its own; another strategy may have saved more."""
        return {name for name in saved if name.startswith(SYNC)}

    def facts(self) -> dict[str, Any]:
        return {}

    def load(self, facts: Mapping[str, Any]) -> None:
        """There are no facts."""

    def _shared_tensors(self) -> dict[str, Held]:
        return {name: held for copy in self._shared for name, held in copy.held(MOMENTUM).items()}


def replicas_in(saved: Iterable[str]) -> int:
    """How many replicas have saved parameters of their own; 0 if none."""
    numbers: Sequence[int] = [int(found[1]) for name in saved if (found := _NAME.match(name))]
    return max(numbers, default=-1) + 1
