"""A meeting: a barrier of processes of one host, one byte to each peer and one from each.

The kernel does the waiting, so that a rank that waits leaves its core to one that works: ranks may outnumber cores. It
also reports a dead peer at once, as the end of its stream. A peer may be one meeting ahead; its byte then lies ready.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping


class Meeting:
    """The streams to the peers, by rank. All ranks of a group meet equally often.

    Peers are heard one after the other, in plain blocking calls: that takes half the time of `poll` and a call.
    """

    def __init__(self, peers: Mapping[int, socket.socket], *, timeout_s: float) -> None:
        self._peers, self._timeout_s = dict(peers), timeout_s
        timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for peer in self._peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def __call__(self) -> None:
        """Returns when every peer has come as often. Raises `RuntimeError` where one is dead, or does not come."""
        for rank, peer in self._peers.items():
            try:
                peer.send(b"\0")
            except OSError:
                raise _closed(rank) from None
        for rank, peer in self._peers.items():
            self._hear(rank, peer)

    def close(self) -> None:
        """Leaves for good: the peers' next meeting fails at once."""
        for peer in self._peers.values():
            peer.close()

    def _hear(self, rank: int, peer: socket.socket) -> None:
        try:
            heard = peer.recv(1)
        except BlockingIOError:
            raise RuntimeError(f"Timed out after {self._timeout_s:g} s waiting for rank {rank} of the group") from None
        except OSError:
            heard = b""
        if not heard:
            raise _closed(rank)


def _closed(rank: int) -> RuntimeError:
    return RuntimeError(f"Connection closed by peer: rank {rank} of the group is gone")
