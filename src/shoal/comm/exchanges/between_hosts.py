"""`BetweenHosts`: one exchange per link level. Numbers are summed inside each host, and only the sums of hosts go
through the exchange of the slow links.

    every rank of a host    reduce to the rank that leads this buffer         (shared memory: as they are)
    leading ranks           the exchange between hosts, with a codec          (the same bytes as with a rank a host)
    every rank of a host    broadcast from the rank that leads

A sum is coded once a host and not once a rank, so what it loses does not grow with the ranks of a host. Buffers take
turns: buffer i is led by place i mod n of each host, so that the ranks of a host share the work of coding.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import Exchange

IN_HOST = 1
"""Buffers that are being summed inside the host, beyond which the oldest goes on."""


class Levels(NamedTuple):
    """A group on several hosts: `mates` are the ranks of this one, `across` those with this rank's place in theirs
    (None where some host has no such place), and `leading` the number of places that every host has.
    """

    mates: Collective
    across: Collective | None
    leading: int


@dataclass
class InOrder:
    """The buffers of one group on their way; ranks of a host move them on in the same order."""

    levels: Levels
    made: int = 0
    in_host: deque[BetweenHosts] = field(default_factory=deque)
    between: list[BetweenHosts] = field(default_factory=list)

    def next_leader(self) -> int:
        """The place that leads one more buffer."""
        self.made += 1
        return (self.made - 1) % self.levels.leading

    def pass_on(self, *, beyond: int) -> None:
        """All but the last `beyond` buffers go from their hosts to the links between them."""
        while len(self.in_host) > beyond:
            self.in_host.popleft().enter()

    def finish(self) -> None:
        """All that were settled are decoded, each by its leader, and told inside the hosts."""
        for exchange in self.between:
            exchange.tell()
        self.between.clear()


class BetweenHosts:
    """The sum of `result` over all ranks of `order.levels`. `leader` is a place; `inner` is the exchange of the sums of
    hosts in the same buffer, on the ranks that lead it, None on the others.
    """

    by_microbatch: ClassVar[bool] = False

    def __init__(self, order: InOrder, result: Tensor, *, leader: int, inner: Exchange | None) -> None:
        self.result, self._order, self._leader, self._inner = result, order, leader, inner
        self._mates = order.levels.mates
        self._handle: Handle | None = None
        self._sent = False

    def start(self) -> None:
        self._sent, self._handle = False, None
        if self._inner is not None:
            self._inner.start()

    def send(self, buffer: Tensor) -> None:
        self._sent, self._buffer = True, buffer
        self._handle = self._mates.reduce(buffer, root=self._leader)
        self._order.in_host.append(self)
        self._order.pass_on(beyond=IN_HOST)

    def enter(self) -> None:
        """The host's sum is there: it leaves for the other hosts."""
        if self._handle is not None:
            self._handle.wait()
        if self._inner is not None:
            self._inner.send(self._buffer)

    def land(self) -> None:
        self._order.pass_on(beyond=0)
        if self._inner is not None:
            self._inner.land()

    def settle(self) -> None:
        self._order.pass_on(beyond=0)
        if self._inner is not None:
            self._inner.settle()
        if self._sent:
            self._order.between.append(self)

    def tell(self) -> None:
        """The leader waits for the sum, and starts to tell it to its host."""
        if self._inner is not None:
            self._inner.wait()
        self._handle = self._mates.broadcast(self.result, root=self._leader)

    def wait(self) -> None:
        self._order.finish()
        if self._handle is not None:
            self._handle.wait()
            self._handle = None

    def commit(self) -> None:
        if self._inner is not None:
            self._inner.commit()
