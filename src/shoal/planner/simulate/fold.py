"""Which devices of a layout are simulated, how fast each is, and the step that they take on a perfect network.

On a network without latency and with unbounded rate nothing shares anything, and the end of an action is that of the
last thing it waits for plus its own seconds: a longest path, which is computed for all replicas at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.planner.simulate.work import Stragglers, Work, lasting_s
from shoal.schedules.check import needs, walk
from shoal.schedules.table import Action, ScheduleTable


@dataclass(frozen=True, kw_only=True)
class Fold:
    """There are `replicas` pipelines of `peers` devices a rank. Each flag says whether one stands for all."""

    replicas: int = 1
    peers: int = 1
    fold_replicas: bool = True
    fold_peers: bool = True

    @property
    def shown_replicas(self) -> int:
        """Replicas that are simulated."""
        return 1 if self.fold_replicas else self.replicas

    @property
    def shown_peers(self) -> int:
        """Peers of a rank that are simulated."""
        return 1 if self.fold_peers else self.peers


def paces_of(table: ScheduleTable, fold: Fold, stragglers: Stragglers) -> list[np.ndarray]:
    """By pipeline rank, how many times as long as it should each action takes: [replica, peer, action].

    A peer that stands for all is as slow in each action as the slowest of them.
    """
    paces = []
    for rank, row in enumerate(table.rows):
        if stragglers.even:
            paces.append(np.ones((fold.shown_replicas, fold.shown_peers, len(row))))
            continue
        own = stragglers.paces(rank, replicas=fold.replicas, peers=fold.peers, actions=len(row))[: fold.shown_replicas]
        paces.append(own.max(axis=1, keepdims=True) if fold.fold_peers else own)
    return paces


def perfect_step_s(table: ScheduleTable, work: Work, paces: list[np.ndarray]) -> float:
    """Seconds of the step where messages take no time."""
    needed = needs(table)
    ends: dict[Action, np.ndarray] = {}
    last = [np.zeros(len(pace)) for pace in paces]
    done = [0] * table.ranks
    for rank, action in walk(table, needed):
        begin = np.maximum.reduce([last[rank], *(ends[earlier] for earlier in needed[action])])
        slowest = paces[rank][:, :, done[rank]].max(axis=1)  # peers start and end together
        last[rank] = ends[action] = begin + slowest * lasting_s(work.stages[action.stage], action)
        done[rank] += 1
    return float(max(end.max() for end in last)) + work.optimizer_s
