"""Groups whose calls run one after the other, as NCCL's do, between threads of one process.

A message is passed when its two ends are each the first of what is left of their rank's calls in the group. Where every
rank waits for one that is not, none ever will be: all of them raise. As NCCL's, the first call from one rank to another
keeps the thread that makes it until the other end has been called, too.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.errors import CollectiveError
from tests.waiting import HANG_S


@dataclass(eq=False)
class Call:
    """One end of a message: `peer` is the other. Tags are ignored, as by NCCL."""

    network: Network
    sends: bool
    peer: int
    tensor: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        self.network.wait_for(self)


@dataclass(eq=False)
class Network:
    """All groups of `ranks` threads, by their ranks and lanes."""

    ranks: int
    groups: dict[tuple[tuple[int, ...], str], defaultdict[int, deque[Call]]] = field(default_factory=dict)
    connected: set[Any] = field(default_factory=set)
    waiting: list[Call] = field(default_factory=list)
    left: int = 0
    stuck: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def member(self, rank: int, ranks: Sequence[int], lane: str = "") -> Member:
        """A rank of the group of `ranks`."""
        return Member(self, (tuple(ranks), lane), tuple(ranks).index(rank), len(ranks))

    def add(self, key: tuple[tuple[int, ...], str], rank: int, call: Call) -> Call:
        with self.changed:
            calls = self.groups.setdefault(key, defaultdict(deque))
            calls[rank].append(call)
            while _passes_one(calls):
                self.changed.notify_all()
            end = key, rank, call.peer, call.sends
            if end not in self.connected:
                self.connected.add(end)
                self._await(call)
        return call

    def wait_for(self, call: Call) -> None:
        with self.changed:
            self._await(call)

    def leave(self) -> None:
        """A rank makes no more calls."""
        with self.changed:
            self.left += 1
            self._look()

    def _await(self, call: Call) -> None:
        self.waiting.append(call)
        self._look()
        self.changed.wait_for(lambda: call.done or self.stuck, HANG_S)
        self.waiting.remove(call)
        if not call.done:
            raise CollectiveError(f"a message {'to' if call.sends else 'from'} {call.peer} never ran")

    def _look(self) -> None:
        waits = sum(not call.done for call in self.waiting)
        self.stuck = self.stuck or (waits > 0 and waits + self.left == self.ranks)
        self.changed.notify_all()


def _passes_one(calls: dict[int, deque[Call]]) -> bool:
    firsts = {rank: own[0] for rank, own in calls.items() if own}
    for rank, first in firsts.items():
        other = firsts.get(first.peer)
        if first.sends and other is not None and not other.sends and other.peer == rank:
            other.tensor.copy_(first.tensor)
            for end in (rank, first.peer):
                calls[end].popleft().done = True
            return True
    return False


@dataclass(frozen=True)
class Member:
    """A rank of a group: `Messages`."""

    network: Network
    key: tuple[tuple[int, ...], str]
    rank: int
    size: int

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Call:
        return self.network.add(self.key, self.rank, Call(self.network, True, to, tensor.detach().clone()))

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Call:
        return self.network.add(self.key, self.rank, Call(self.network, False, source, tensor))


@dataclass(frozen=True)
class ThreadMesh:
    """As much of a `Mesh` as messages need."""

    network: Network
    rank: int

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def ranks(self, ranks: Sequence[int], *, lane: str = "") -> Member:
        return self.network.member(self.rank, ranks, lane)
