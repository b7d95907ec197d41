"""`StoreServer`: keys and values for the ranks of a job, and for nobody else.

A thread with an event loop serves them. A connection begins with the handshake of `launcher.handshake`: who does not
know the token is closed after it, or after `Limits.handshake_s`, and has cost a frame of 512 bytes. Of those that are
in the handshake only so many are kept; the oldest goes first, since an honest peer is through in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.launcher import frames, handshake, sockets
from shoal.launcher.sockets import BACKLOG
from shoal.launcher.store.messages import MOST_FRAME_BYTES, REPLY_BYTES, REQUESTS, SERVICE, Reply, Request

LOG = logging.getLogger("shoal.store")
_GONE = (OSError, TimeoutError, asyncio.IncompleteReadError, frames.FrameError)


@dataclass(frozen=True)
class Limits:
    """How long a stranger may take for its handshake, and how many may be in theirs at once."""

    handshake_s: float = 20.0
    strangers: int = 8192


@dataclass(eq=False)
class Waiter:
    """A request for keys of which `missing` are not there yet."""

    request: Request
    missing: set[str]
    answer: Callable[[Reply], None]
    timer: asyncio.TimerHandle | None = None


class Keys:
    """The keys and their values, and who waits for which. It does no I/O: replies go where `answer` puts them."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, set[Waiter]] = defaultdict(set)

    def handle(self, request: Request, answer: Callable[[Reply], None]) -> Waiter | None:
        """Answers at once, or returns what waits for its keys (see `give_up`). Raises `FrameError` for a request that
        makes no sense, such as an addition to what is no number.
        """
        if request.operation in ("get", "wait"):
            waiter = Waiter(request, self._missing(request.keys), answer)
            if not waiter.missing:
                self._found(waiter)
                return None
            for key in waiter.missing:
                self._waiting[key].add(waiter)
            return waiter
        try:
            answer(self._changed(request))
        except (ValueError, IndexError) as error:
            raise frames.FrameError(f"a request {request.operation} makes no sense ({error})") from None
        return None

    def give_up(self, waiter: Waiter) -> None:
        """The waiter's time is over, or it is gone."""
        for key in waiter.missing:
            self._waiting[key].discard(waiter)
            if not self._waiting[key]:
                del self._waiting[key]

    def _changed(self, request: Request) -> Reply:
        values, number, keys = self._values, request.number, request.keys
        match request.operation:
            case "set":
                for key, value in zip(keys, request.values, strict=True):
                    self._put(key, value)
                return Reply(number)
            case "add":
                amount = int(values.get(keys[0], b"0")) + request.amount
                self._put(keys[0], b"%d" % amount)
                return Reply(number, amount=amount)
            case "append":
                self._put(keys[0], values.get(keys[0], b"") + request.values[0])
                return Reply(number)
            case "compare_set":
                expected, desired = request.values
                if values.get(keys[0], b"") == expected:
                    self._put(keys[0], desired)
                return Reply(number, values=[values.get(keys[0], expected)])
            case "check":
                return Reply(number, found=not self._missing(keys))
            case "delete_key":
                return Reply(number, found=values.pop(keys[0], None) is not None)
            case "num_keys":
                return Reply(number, amount=len(values))
            case "list_keys":
                return Reply(number, values=[key.encode() for key in values])
        raise ValueError(request.operation)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiting.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                waiter.missing = self._missing(waiter.request.keys)  # what was deleted meanwhile
                for gone in waiter.missing:
                    self._waiting[gone].add(waiter)
            if not waiter.missing:
                self._found(waiter)

    def _found(self, waiter: Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        values: list[bytes] = []
        size = 0
        for key in waiter.request.keys if waiter.request.operation == "get" else ():
            value = self._values[key]
            size += len(value)
            if values and size > REPLY_BYTES:
                break
            values.append(value)
        waiter.answer(Reply(waiter.request.number, values=values))

    def _missing(self, keys: Sequence[str]) -> set[str]:
        return {key for key in keys if key not in self._values}


@dataclass(eq=False)
class _Peer:
    """One connection: what it waits for."""

    writer: asyncio.StreamWriter
    waiters: set[Waiter] = field(default_factory=set)

    def reply(self, reply: Reply) -> None:
        self.writer.write(frames.encode(reply))


class StoreServer:
    """Serves on a socket that listens, from its creation until `close` or the end of the process."""

    def __init__(self, listener: socket.socket, *, token: bytes, limits: Limits = Limits()) -> None:
        sockets.allow_descriptors()
        self._listener, key = listener, handshake.key_for(token, SERVICE)
        self._keys = Keys()
        self._strangers = handshake.Strangers(key, most=limits.strangers, limit_s=limits.handshake_s)
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="shoal-store", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Ends the service and all connections."""
        try:
            self._loop.call_soon_threadsafe(self._serving.cancel)
        except RuntimeError:  # it has ended
            return
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop), contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, backlog=BACKLOG)
        try:
            await server.serve_forever()
        finally:
            others = asyncio.all_tasks() - {self._serving}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(writer)
        try:
            if not await self._strangers.admit(reader, writer):
                LOG.info("%s does not know the job's token", writer.get_extra_info("peername"))
            else:
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await self._serve_peer(peer, reader)
        except _GONE as error:
            LOG.info("a connection from %s was closed: %s", writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            pass
        finally:
            for waiter in peer.waiters:
                self._end(waiter)
            writer.transport.abort()

    async def _serve_peer(self, peer: _Peer, reader: asyncio.StreamReader) -> None:
        while True:  # without a limit on time: a rank that is stopped in the middle of a frame may go on later
            body = await frames.read(reader, most_bytes=MOST_FRAME_BYTES, begin_s=None, rest_s=None)
            request: Request = frames.decode(body, REQUESTS)
            waiter = self._keys.handle(request, peer.reply)
            if waiter is not None:
                peer.waiters = {other for other in peer.waiters if other.missing} | {waiter}
                waiter.timer = self._loop.call_later(request.timeout_s, self._late, peer, waiter)
            await peer.writer.drain()

    def _late(self, peer: _Peer, waiter: Waiter) -> None:
        self._end(waiter)
        peer.waiters.discard(waiter)
        peer.reply(Reply(waiter.request.number, found=False))

    def _end(self, waiter: Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._keys.give_up(waiter)
