"""Messages between ranks of a group where the backend keeps all calls of a group in one sequence, as NCCL does.

A group over NCCL that is connected when it opens has one communicator and one stream: its calls run in the order in
which they are made, messages to other ranks among them (torch 2.7 to 2.13). A receive that is posted ahead then keeps
back a send to somebody else, which the awaited rank may need before it sends: 1F1B on four ranks stands still for ever.
NCCL allows no two streams on one communicator, so each sender and receiver get a group of their own.

NCCL connects a sender and a receiver in their first message, and keeps the threads of both until it has
(`ncclTransportP2pSetup`). A first receive that is posted ahead would keep its rank from what the sender waits for, so
that each group passes a number when it opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from shoal.comm.collective import Collective, Handle

Pair = tuple[int, int]
"""The places of a sender and of a receiver in a group."""


class Messages(Protocol):
    """Of one rank of a group, to others and from them; see `Collective`."""

    @property
    def rank(self) -> int: ...

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle: ...

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle: ...


class OpensGroups(Protocol):
    """A `Mesh`, as messages need it."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def ranks(self, ranks: Sequence[int], *, lane: str = "") -> Collective: ...


class PairedMessages:
    """`Messages` of the ranks at `places`, those of the world by their places in the group; between `pairs` alone.

    Opens groups: all ranks at `places` make it with the same pairs, in the same order as they open other groups.
    """

    def __init__(self, mesh: OpensGroups, places: Sequence[int], pairs: Iterable[Pair]) -> None:
        self.rank = places.index(mesh.rank)
        self._groups: dict[Pair, Collective] = {}
        for pair in sorted(set(pairs), key=_turn):
            if self.rank in pair:
                two = sorted(places[place] for place in pair)
                self._groups[pair] = mesh.ranks(two, lane="ahead" if pair[0] < pair[1] else "back")
                self._connect(pair, torch.zeros(1, device=mesh.device))

    def _connect(self, pair: Pair, number: torch.Tensor) -> None:
        sender, receiver = pair
        passes = self.send(number, to=receiver) if self.rank == sender else self.recv(number, source=sender)
        passes.wait()

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        return self._groups[self.rank, to].send(tensor, to=int(to > self.rank), tag=tag)

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        return self._groups[source, self.rank].recv(tensor, source=int(source > self.rank), tag=tag)


def _turn(pair: Pair) -> tuple[int, int, int, int]:
    """When a pair opens its group: one order for all ranks, so that none waits for one that waits for it. Every second
    pair of a chain comes first: they open at once, while in the order of the chain each would wait for the one before.
    """
    first, second = min(pair), max(pair)
    return first % 2, first, second, pair[0]


def messages_of(mesh: OpensGroups, places: Sequence[int], pairs: Iterable[Pair]) -> Messages:
    """Between the ranks at `places`: over their group on the CPU, where messages find their receives by tags, else in
    groups of two.
    """
    return PairedMessages(mesh, places, pairs) if mesh.device.type == "cuda" else mesh.ranks(places)
