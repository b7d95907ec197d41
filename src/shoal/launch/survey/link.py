"""The link between two hosts, measured over one TCP connection: round trip, rate, and how far the clocks are apart.

The peer's clock is ahead by (Mills, RFC 5905, section 8)

    ((t2 - t1) + (t3 - t4)) / 2,

with t1 and t4 taken here, when a ping leaves and its answer comes, t2 and t3 there. Of all pings the one with the
shortest round trip counts; half of that round trip bounds the error. The rate is found by bursts that double until one
takes `LONG_ENOUGH_S` or all of them `MOST_S`: short ones see buffers and slow start, not the link.
"""

from __future__ import annotations

import hmac
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shoal.launch.sockets import BACKLOG, obstacle
from shoal.launch.survey.messages import SurveyedLink

PINGS = 40
FIRST_BURST_BYTES, MOST_BURST_BYTES = 64 << 10, 1 << 30
LONG_ENOUGH_S, MOST_S = 0.2, 1.0
PATIENCE_S = 10.0
_CHUNK = bytes(64 << 10)
_TOKEN_BYTES = 64
_REQUEST = struct.Struct("!Q")
_TIMES = struct.Struct("!dd")


@contextmanager
def listening(port: int, token: str) -> Iterator[tuple[int, str | None]]:
    """Answers `measure` on every interface until the end of the block; connections without the token are closed.

    Yields the port, and why it is another than `port` (0: any).
    """
    fault = None
    try:
        listener = _listener(port)
    except OSError as error:
        fault = (error.strerror or str(error)).lower()
        listener = _listener(0)
    with listener:
        threading.Thread(target=_accept, args=(listener, _padded(token)), daemon=True).start()
        yield listener.getsockname()[1], fault


def measure(address: str, port: int, token: str, *, rate: bool = True) -> SurveyedLink:
    """The link to a peer that is `listening`; an `obstacle` where it cannot be reached or does not answer.

    Without `rate` nothing is sent but pings, and `bytes_per_s` is 0.
    """
    if (found := obstacle(address, port)) is not None:
        return SurveyedLink(obstacle=found)
    try:
        with socket.create_connection((address, port), PATIENCE_S) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(_padded(token))
            trips = [_ping(peer) for _ in range(PINGS)]
            bytes_per_s = _rate(peer) if rate else 0.0
    except OSError as error:
        return SurveyedLink(obstacle=f"it took the connection, then: {(error.strerror or str(error)).lower()}")
    return SurveyedLink(
        round_trip_s=statistics.median(trip for trip, _ in trips), bytes_per_s=bytes_per_s, ahead_s=min(trips)[1]
    )


def _ping(peer: socket.socket) -> tuple[float, float]:
    """Its round trip, and how far the peer's clock is ahead by it, in seconds."""
    start, t1 = time.perf_counter(), time.time()
    peer.sendall(_REQUEST.pack(0))
    t2, t3 = _TIMES.unpack(_read(peer, _TIMES.size))
    trip = time.perf_counter() - start
    # t4 is t1 and the time that passed, which a step of the clock in between does not change.
    return trip, ((t2 - t1) + (t3 - (t1 + trip))) / 2


def _rate(peer: socket.socket) -> float:
    size, start = FIRST_BURST_BYTES, time.perf_counter()
    while True:
        begun = time.perf_counter()
        peer.sendall(_REQUEST.pack(size))
        for _ in range(size // len(_CHUNK)):
            peer.sendall(_CHUNK)
        _read(peer, _TIMES.size)
        now = time.perf_counter()
        if now - begun >= LONG_ENOUGH_S or now - start >= MOST_S or size >= MOST_BURST_BYTES:
            return size / (now - begun)
        size *= 2


def _accept(listener: socket.socket, token: bytes) -> None:
    with suppress(OSError):  # closed, at the end
        while True:
            threading.Thread(target=_answer, args=(listener.accept()[0], token), daemon=True).start()


def _answer(client: socket.socket, token: bytes) -> None:
    buffer = bytearray(256 << 10)
    with client, suppress(OSError):
        client.settimeout(PATIENCE_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_read(client, _TOKEN_BYTES), token):
            return
        while True:
            (left,) = _REQUEST.unpack(_read(client, _REQUEST.size))
            received = time.time()
            while left:
                got = client.recv_into(buffer, min(left, len(buffer)))
                if got == 0:
                    return
                left -= got
            client.sendall(_TIMES.pack(received, time.time()))


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)


def _read(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("the peer closed the connection")
        found += piece
    return bytes(found)


def _padded(token: str) -> bytes:
    return token.encode()[:_TOKEN_BYTES].ljust(_TOKEN_BYTES)
