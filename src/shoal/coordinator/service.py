"""The service: reads frames, asks `Membership`, writes the journal, answers. One loop, so that events have an order.

Nobody without the token gets further than the handshake, which has a time limit and small frames. Of those that are in
it only so many are kept: when there are more, the oldest is closed, and an honest peer is through in milliseconds. A
peer that is slow to send a frame or to read an answer is closed, too, and never waited for by others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.coordinator.client import Address
from shoal.coordinator.journal import Journal
from shoal.errors import EnvironmentFault, InUse, UsageError
from shoal.launcher import frames, handshake, sockets
from shoal.launcher.environment import LOOPBACK
from shoal.launcher.handshake import make_token
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

    handshake_s: float = 20.0
    idle_s: float = 60.0
    frame_s: float = 5.0
    strangers: int = 8192
    peers: int = 20_000


class RunningClock:
    """Seconds in which this process ran, by a `clock` that is read at least every `period_s`.

    Where it was not read for twice as long, the process itself stood still: it was stopped, or its machine was. Nobody
    could be heard then, so that nobody was silent.
    """

    def __init__(self, clock: Callable[[], float], period_s: float) -> None:
        self._clock, self._period_s = clock, period_s
        self._read, self._lost = clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        late = now - self._read - self._period_s
        if late > self._period_s:
            LOG.warning("the coordinator stood still for %.1f s, which count as nobody's silence", late)
            self._lost += late
        self._read = now
        return now - self._lost


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
        self._journal, self._limits = journal, limits
        self._period_s = rules.silence_s / 5
        self._clock = RunningClock(clock, self._period_s)
        self.membership = Membership(rules, self._clock(), history=journal.read())
        journal.replace(self.membership.snapshot())
        self._strangers = handshake.Strangers(token, most=limits.strangers, limit_s=limits.handshake_s)
        self._peers: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        self._unwritten: list[Decision] = []
        self._written: asyncio.Future[None] | None = None

    async def run(self, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Serves on a bound socket until it is cancelled. Raises `EnvironmentFault` where the journal fails."""
        self._failed = asyncio.get_running_loop().create_future()
        sockets.allow_descriptors()
        server = await asyncio.start_server(
            self._connected,
            sock=listener,
            backlog=sockets.BACKLOG,
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
            tasks = [*self._strangers.tasks, *self._peers]
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it ends by what it ends by
                await asyncio.gather(*tasks, return_exceptions=True)  # who waits for an answer sees the connection end

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            await self._settled(self.membership.tick(self._clock()))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if not await self._strangers.admit(reader, writer):
                LOG.warning("%s does not know the job's token", writer.get_extra_info("peername"))
            elif len(self._peers) < self._limits.peers:
                self._peers.add(task)
                await self._serve(reader, writer)
        except _GONE as error:
            LOG.info("a connection from %s was closed: %s", writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            pass
        finally:
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
            writer.write(frames.encode(await self._settled(self.membership.handle(event, self._clock()))))
            async with asyncio.timeout(limits.frame_s):
                await writer.drain()

    async def _settled(self, outcome: Response) -> Answer:
        """The answer, when all that was decided so far is durable: it may tell of what others have brought about."""
        self._unwritten += outcome.decisions
        if self._unwritten:
            if self._written is None:
                loop = asyncio.get_running_loop()
                self._written = loop.create_future()
                loop.call_soon(self._write)
            await asyncio.shield(self._written)
        if outcome.verdict is not None:
            self._tell(outcome.verdict, outcome.verdict.sentence)
        for slow in outcome.slow:
            self._tell(slow, slow.sentence(slow.replica))
        return outcome.answer

    def _write(self) -> None:
        """Writes together what was decided on all that came in together: thousands of replicas join at once, and a disk
        makes some hundred writes durable in a second. A journal that fails ends the service, as any other fault does:
        nobody is told more, and nobody waits on.
        """
        decisions, written = self._unwritten, self._written
        self._unwritten, self._written = [], None
        assert written is not None, "who decides waits for it"
        try:
            self._journal.append(decisions)
            for decision in decisions:
                LOG.info("%s", decision)
                self._tell(decision)
            written.set_result(None)
        except Exception as error:
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)
        finally:
            written.cancel()  # nothing, where it has its result

    def _tell(self, news: Decision | Divergence | Slow, sentence: str = "") -> None:
        """Says it once: to who has asked to be told, else the `sentence` to the log."""
        if self._told is not None:
            self._told(news)
        elif sentence:
            LOG.warning("%s", sentence)


# The coordinator as a program, and as a thread of the launcher.
#
# `shoal coordinator serve` checks where it may listen, and runs the service. A launcher runs it in a thread, on
# loopback, for its one run.


BACKLOG = 4096


def serve(
    rules: Rules,
    *,
    address: str,
    port: int,
    journal: Path,
    token: Path,
    certificate: Path | None = None,
    key: Path | None = None,
    limits: Limits = Limits(),
    listening: Callable[[str, int], None],
) -> None:
    """Serves until SIGTERM or Ctrl-C. `listening` hears the address and the port (0: any free one) once it does.

    Raises `UsageError` for an address beyond loopback without a certificate, `InUse` for a port or a journal that
    another process holds, and `EnvironmentFault`.
    """
    tls = _tls(address, certificate, key)
    secret = make_token(token)
    with contextlib.closing(listen(address, port)) as listener, contextlib.closing(Journal(journal)) as records:
        service = Service(rules, records, token=secret, limits=limits)
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_until_signalled(service, listener, tls, listening))


async def _until_signalled(
    service: Service, listener: socket.socket, tls: ssl.SSLContext | None, listening: Callable[[str, int], None]
) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    listening(*listener.getsockname()[:2])  # who hears it may send a signal at once
    await service.run(listener, tls=tls)


def _tls(address: str, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        if not ipaddress.ip_address(_resolved(address)).is_loopback:
            raise UsageError(
                f"the coordinator would listen on {address} without TLS: beyond loopback everybody on the way could "
                "read and change what ranks say; give --certificate and --key"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise EnvironmentFault(
            f"the certificate {certificate} and its key cannot be used ({error}): both are PEM files, "
            "the key without a passphrase"
        ) from error
    return context


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `InUse` and `EnvironmentFault`."""
    host = _resolved(address)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        kind = InUse if error.errno == errno.EADDRINUSE else EnvironmentFault
        raise kind(f"the coordinator cannot listen on {address}:{port} ({error.strerror}): give another") from error
    return listener


def _resolved(address: str) -> str:
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise EnvironmentFault(f"{address} has no address ({error}): give one of this host") from error


@contextlib.contextmanager
def coordinator_in(
    folder: Path,
    rules: Rules,
    *,
    told: Callable[[Decision | Divergence | Slow | Exception], None],
    journal: Callable[[Path], Journal] = Journal,
    limits: Limits = Limits(),
) -> Iterator[Address]:
    """Serves until the end of the block, with its token in `folder`, and what `journal` opens there.

    `told` hears, in the coordinator's thread, of decisions, of verdicts on fingerprints, of slow members, and of the
    fault that ended the service, such as a full disk. Raises `EnvironmentFault` where it cannot start.
    """
    token, records = make_token(folder / "token"), journal(folder / "journal")
    with contextlib.closing(records), contextlib.closing(listen(LOOPBACK, 0)) as listener:
        service = Service(rules, records, token=token, limits=limits, told=told)
        loop = asyncio.new_event_loop()
        serving = loop.create_task(service.run(listener))

        def serve() -> None:
            with contextlib.closing(loop):
                try:
                    loop.run_until_complete(serving)
                except asyncio.CancelledError:
                    pass
                except Exception as error:
                    told(error)

        thread = threading.Thread(target=serve, name="shoal-coordinator", daemon=True)
        thread.start()
        try:
            yield Address(LOOPBACK, listener.getsockname()[1], token)
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(serving.cancel)
            thread.join()
