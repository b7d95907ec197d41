"""What the leaders of hosts say to each other: each piece straight to whom it concerns, sums in the order of hosts.

Direct exchange sends the same bytes as a ring, in one step instead of m-1, to m-1 peers. Sums are made by whoever gets
the parts, hosts from left to right and 16-bit floats in float32: the same bits on all ranks and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.collective import Collective, Handle, Reduction
from shoal.comm.shm.two_shot import combine

_TAG = 800_001
"""Of every exchange: messages between two leaders arrive in the order in which they were sent."""


@dataclass(frozen=True)
class Swap:
    """An exchange under way; it keeps the tensors that are being sent."""

    handles: Sequence[Handle]
    held: Sequence[Tensor]

    def wait(self) -> None:
        """Until all was sent and all has come."""
        for handle in self.handles:
            handle.wait()


def swap(leaders: Collective, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Swap:
    """`outgoing[h]` goes to host h, `incoming[h]` comes from there; contiguous, and empty where nothing is to be sent.

    A host's own places are left alone.
    """
    others = [host for host in range(leaders.size) if host != leaders.rank]
    handles = [leaders.recv(incoming[h], source=h, tag=_TAG) for h in others if incoming[h].numel()]
    handles += [leaders.send(outgoing[h], to=h, tag=_TAG) for h in others if outgoing[h].numel()]
    return Swap(handles, outgoing)


class Sum:
    """A reduction over hosts of a flat tensor, cut into a part for each host: `start`, `share`, `finish`.

    Afterwards every leader has the whole. `start` leaves the tensor as it is; it has to stay so until `share`.
    """

    def __init__(self, leaders: Collective, piece: Tensor, op: Reduction) -> None:
        self._leaders = leaders
        self._op: Reduction = op
        self._parts = piece.tensor_split(leaders.size)

    def start(self) -> None:
        """Sends every host its part."""
        own = self._parts[self._leaders.rank]
        self._others = room(own, self._leaders)
        self._under_way = swap(self._leaders, self._parts, self._others)

    def share(self) -> None:
        """Adds up the own part and sends it to every host."""
        self._under_way.wait()
        own = self._parts[self._leaders.rank]
        add_hosts(self._others, own, self._leaders.rank, self._op)
        self._under_way = swap(self._leaders, [own] * len(self._parts), self._parts)

    def finish(self) -> None:
        """Until the whole is here."""
        self._under_way.wait()


def room(own: Tensor, leaders: Collective) -> list[Tensor]:
    """For what comes from the other hosts, each as large as `own`."""
    return [own.new_empty(0 if host == leaders.rank else own.numel()) for host in range(leaders.size)]


def add_hosts(others: list[Tensor], own: Tensor, host: int, op: Reduction) -> None:
    """`own`, of host `host`, becomes the reduction of all; `others[h]` came from host h."""
    if own.numel():
        others[host] = own if host < 2 else own.clone()  # behind the first sum, `own` is no longer what it was
        combine(others, op, out=own)
