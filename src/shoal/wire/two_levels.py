"""`TwoLevels`: ranks on several hosts, as many on each. Sums go through shared memory inside a host.

    all_reduce    reduce-scatter inside each host, all-reduce of each part between the ranks that have it, all-gather
                  inside: 2 (m-1)/m S leaves each of m hosts; a sum over TCP alone sends n times as much from n ranks
    others        over TCP between all ranks

Sums run over the ranks of a host, then over hosts: the same bits on all ranks, but not those of a sum in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.comm.ledger import Sent
from shoal.wire.arrays import Array
from shoal.wire.memory import SharedMemory
from shoal.wire.tcp import Tcp


class TwoLevels:
    """`flat` joins all ranks, `inside` those of this host, `across` those with this rank's place on each host."""

    def __init__(self, flat: Tcp, inside: SharedMemory, across: Tcp) -> None:
        self.rank, self.size = flat.rank, flat.size
        self._flat, self._inside, self._across = flat, inside, across

    def all_reduce(self, send: Array, receive: Array, op: str) -> Sent:
        mates, hosts = self._inside.size, self._across.size
        each = -(-send.size // mates)
        padded = np.zeros(each * mates, send.dtype)
        padded[: send.size] = send.reshape(-1)
        part = np.empty(each, send.dtype)
        step = "sum" if op == "avg" else op
        sent = [self._inside.reduce_scatter(padded, part, step), self._across.all_reduce(part, part, step)]
        sent.append(self._inside.all_gather(part, padded))
        if op == "avg":
            np.divide(padded, mates * hosts, out=padded, casting="same_kind")
        receive.reshape(-1)[...] = padded[: send.size]
        return Sent(sum(s.inside_bytes for s in sent), sum(s.between_bytes for s in sent))

    def reduce_scatter(self, send: Array, receive: Array, op: str) -> Sent:
        return self._flat.reduce_scatter(send, receive, op)

    def all_gather(self, send: Array, receive: Array) -> Sent:
        return self._flat.all_gather(send, receive)

    def broadcast(self, array: Array, root: int) -> Sent:
        return self._flat.broadcast(array, root)

    def all_to_all(self, send: Sequence[Array], receive: Sequence[Array]) -> Sent:
        return self._flat.all_to_all(send, receive)

    def send(self, array: Array, to: int, tag: int) -> Sent:
        return self._flat.send(array, to, tag)

    def receive(self, array: Array, source: int, tag: int) -> Sent:
        return self._flat.receive(array, source, tag)

    def barrier(self) -> Sent:
        return self._flat.barrier()

    def close(self) -> None:
        """Ends all three."""
        for transport in (self._flat, self._inside, self._across):
            transport.close()
