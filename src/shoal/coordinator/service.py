"""The service: reads frames, asks `Membership`, writes the journal, answers. One loop, so that events have an order.

Nobody without the token gets further than the handshake, which has a time limit and small frames. Of those that are in
it only so many are kept: when there are more, the oldest is closed, and an honest peer is through in milliseconds. A
peer that is slow to send a frame or to read an answer is closed, too, and never waited for by others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shoal.coordinator.journal import Journal
from shoal.errors import EnvironmentFault
from shoal.launch import frames, handshake
from shoal.resilience.detection import Divergence, Slow
from shoal.resilience.events import Answer, Decision, Event
from shoal.resilience.membership import Membership, Response, Rules

LOG = logging.getLogger("shoal.coordinator")
MOST_REQUEST_BYTES = 16 << 10
EVENTS = msgspec.msgpack.Decoder(Event)
_GONE = (OSError, TimeoutError, asyncio.IncompleteReadError, frames.FrameError)


@dataclass(frozen=True)
class Limits:
    """Seconds and connections that a peer can take. `idle_s`: without a frame; `frame_s`: for one frame, to send or to
    read; `strangers`: connections whose peer has not proved that it has the token; `peers`: those that have."""

    handshake_s: float = 5.0
    idle_s: float = 60.0
    frame_s: float = 5.0
    strangers: int = 64
    peers: int = 20_000


class Service:
    """Membership behind a socket. `clock` counts seconds, and never goes back. `told` hears, in the service's thread,
    of every decision that is durable, of every verdict on fingerprints, and of members that stay slow; None: the
    log says the last two."""

    def __init__(
        self,
        rules: Rules,
        journal: Journal[Decision],
        *,
        token: bytes,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
        told: Callable[[Decision | Divergence | Slow], None] | None = None,
    ) -> None:
        self._told = told
        self._journal, self._token, self._limits, self._clock = journal, token, limits, clock
        self.membership = Membership(rules, clock(), history=journal.read())
        journal.replace(self.membership.snapshot())
        self._strangers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._peers: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    async def run(self, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Serves on a bound socket until it is cancelled. Raises `EnvironmentFault` where the journal fails."""
        self._failed = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(
            self._connected,
            sock=listener,
            ssl=tls,
            limit=MOST_REQUEST_BYTES,
            ssl_handshake_timeout=self._limits.handshake_s if tls is not None else None,
        )
        ticking = asyncio.create_task(self._tick())
        try:
            await self._failed
        finally:
            ticking.cancel()
            server.close()
            for task in [*self._strangers, *self._peers]:
                task.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.membership.rules.silence_s / 5)
            self._settled(self.membership.tick(self._clock()))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._strangers[task] = writer
        if len(self._strangers) > self._limits.strangers:
            oldest = next(iter(self._strangers))  # counts no more, although it has yet to end
            del self._strangers[oldest]
            oldest.cancel()
        try:
            if not await handshake.admit(reader, writer, self._token, limit_s=self._limits.handshake_s):
                LOG.warning("%s does not know the job's token", writer.get_extra_info("peername"))
            else:
                self._strangers.pop(task, None)
                if len(self._peers) < self._limits.peers:
                    self._peers.add(task)
                    await self._serve(reader, writer)
        except _GONE as error:
            LOG.info("a connection from %s was closed: %s", writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            pass
        finally:
            self._strangers.pop(task, None)
            self._peers.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(MOST_REQUEST_BYTES)
        limits = self._limits
        while True:
            body = await frames.read(
                reader, most_bytes=MOST_REQUEST_BYTES, begin_s=limits.idle_s, rest_s=limits.frame_s
            )
            event = frames.decode(body, EVENTS)
            writer.write(frames.encode(self._settled(self.membership.handle(event, self._clock()))))
            async with asyncio.timeout(limits.frame_s):
                await writer.drain()

    def _settled(self, outcome: Response) -> Answer:
        """The answer, when what was decided is durable. A journal that fails ends the service: nobody is told more."""
        if outcome.decisions:
            try:
                self._journal.append(outcome.decisions)
            except EnvironmentFault as error:
                if self._failed is not None and not self._failed.done():
                    self._failed.set_exception(error)
                raise asyncio.CancelledError from error
            for decision in outcome.decisions:
                LOG.info("%s", decision)
                self._tell(decision)
        if outcome.verdict is not None:
            self._tell(outcome.verdict, outcome.verdict.sentence)
        for slow in outcome.slow:
            self._tell(slow, slow.sentence(slow.replica))
        return outcome.answer

    def _tell(self, news: Decision | Divergence | Slow, sentence: str = "") -> None:
        """Says it once: to who has asked to be told, else the `sentence` to the log."""
        if self._told is not None:
            self._told(news)
        elif sentence:
            LOG.warning("%s", sentence)
