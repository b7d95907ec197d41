"""A meeting: a barrier of processes of one host, one byte to each peer and one from each.

The kernel does the waiting, so that a rank that waits leaves its core to one that works: ranks may outnumber cores. It
also reports a dead peer at once, as the end of its stream. A peer may be one meeting ahead; its byte then lies ready.

The handshake of processes of one host: every two get a stream between them, and each other's segment.

Each rank opens a Unix socket in a folder of its own that no other user may enter. It knocks at the doors of the lower
ranks and lets the higher ones in; descriptors travel as ancillary data (unix(7), SCM_RIGHTS). A socket with a backlog
takes a connection before it is accepted, so that all can knock first and then enter: nobody waits in a circle.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

from shoal.comm.shm.segment import create_segment


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


Segment = TypeVar("Segment")


class Handshake(Generic[Segment]):
    """One rank's side. `map_segment(descriptor, size_bytes)` makes of a segment what its user wants it as.

    `open`, `knock` and `enter` in this order, each after all ranks have done the one before.

    All raise `OSError`. As a context it leaves no folder and no descriptor but those of `streams`; where its body
    raises, not those either.
    """

    def __init__(
        self, rank: int, size: int, *, segment_bytes: int, map_segment: Callable[[int, int], Segment], timeout_s: float
    ) -> None:
        self._rank, self._size, self._segment_bytes, self._timeout_s = rank, size, segment_bytes, timeout_s
        self._map_segment = map_segment
        self.streams: dict[int, socket.socket] = {}
        self.segments: dict[int, Segment] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Handshake[Segment]:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stack.close()
        if kind is not None:
            self._hang_up()

    def open(self) -> str:
        """The path of this rank's door."""
        folder = tempfile.mkdtemp(prefix="shoal-")  # mode 0700
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._door.settimeout(self._timeout_s)
        self._door.bind(path := os.path.join(folder, "door"))
        self._door.listen(self._size)
        self._own = create_segment(self._segment_bytes)
        self._stack.callback(os.close, self._own)
        self.segments[self._rank] = self._map_segment(self._own, self._segment_bytes)
        return path

    def knock(self, doors: Sequence[str]) -> str:
        """At the doors of all lower ranks, in rank order."""
        for rank, path in enumerate(doors):
            stream = self.streams[rank] = socket.socket(socket.AF_UNIX)
            stream.settimeout(self._timeout_s)
            stream.connect(path)
            self._give(stream)
        return "knocked"

    def enter(self) -> str:
        """Exchanges segments over all streams."""
        try:
            lower = list(self.streams.items())
            for _ in range(self._rank + 1, self._size):
                self._let_in()
            for rank, stream in lower:
                self._take(stream, expected=rank)
        except OSError:
            self._hang_up()  # else the others wait for what does not come
            raise
        return "entered"

    def _let_in(self) -> None:
        stream, _ = self._door.accept()
        stream.settimeout(self._timeout_s)
        try:
            rank = self._take(stream)
        except OSError:
            stream.close()
            raise
        self.streams[rank] = stream
        self._give(stream)

    def _give(self, stream: socket.socket) -> None:
        socket.send_fds(stream, [self._rank.to_bytes(4, "big")], [self._own])

    def _take(self, stream: socket.socket, expected: int | None = None) -> int:
        message, descriptors, _, _ = socket.recv_fds(stream, 4, 1)
        rank = int.from_bytes(message, "big")
        try:
            if len(descriptors) != 1 or expected not in (None, rank):
                raise ConnectionError("a peer hung up while segments were exchanged")
            self.segments[rank] = self._map_segment(descriptors[0], self._segment_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        stream.settimeout(None)
        return rank

    def _hang_up(self) -> None:
        self._stack.close()  # a door that is closed lets go of those who wait before it
        for stream in self.streams.values():
            stream.close()
