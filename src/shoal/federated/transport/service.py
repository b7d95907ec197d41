"""The server's HTTP: reads bounded messages and streams, asks the `Host`, answers. A certificate says who a client is.

POST /join /work /alive                a message
GET  /model/VERSION/WIDTH              the model's frame at a width; with Range, the rest of it
GET  /upload/VERSION/NUMBER            how much of an upload is here, or what became of it
PUT  /upload/VERSION/NUMBER?offset=&total=&digest=    the upload from `offset` on
POST /secret/VERSION/NUMBER            a phase of secure aggregation
POST /enrol                            a token and a request for a certificate; without a certificate, if it is open
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from shoal.errors import EnvironmentFault, InUse, MissingExtra, UsageError
from shoal.federated.report import RoundFigures
from shoal.federated.rounds import Ticket
from shoal.federated.secure.server import Refused
from shoal.federated.transport import messages
from shoal.federated.transport.enrol import MOST_REQUEST_BYTES, name_on, redeem
from shoal.federated.transport.host import POLL_S, Host

try:
    from aiohttp import web
except ImportError as error:
    raise MissingExtra("aiohttp", extra="federated", purpose="federated training over the network") from error

LOG = logging.getLogger("shoal.federated")
CHUNK_S = 30.0
"""Longest that a client may take between two pieces of an upload."""
READ_BYTES = 1 << 20
"""What is read of an upload before it is written."""
REFUSAL_S = 1.0
FAREWELL_S = 60.0
"""How long a server whose run is over waits for clients that have not heard so yet."""
GRACE_S = 2.0
"""How long it stays after the last of them has been told: an answer may be lost, and its client asks again."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_Handler = Callable[["Service", str, web.Request], Awaitable[web.StreamResponse]]


class Service:
    """Serves until the last model is made, or until it is cancelled. `on_round` hears of each model. When the run is
    over, all clients that are there hear so before the server ends, for which it waits `farewell_s` at most, and
    `grace_s` more for those whose answer was lost; a cancellation ends the wait alone. `said` hears of the wait.
    """

    def __init__(
        self,
        host: Host,
        *,
        on_round: Callable[[RoundFigures], object] = str,
        farewell_s: float = FAREWELL_S,
        grace_s: float = GRACE_S,
        said: Callable[[str], object] = str,
        enrolment: Path | None = None,
    ) -> None:
        """`enrolment`: the folder with the authority's key and the tokens, where clients may enrol by themselves."""
        self.host, self.on_round, self.said, self.enrolment = host, on_round, said, enrolment
        self.farewell_s, self.grace_s, self._told_s = farewell_s, grace_s, float("-inf")
        self._uploading: set[Ticket] = set()
        self._dismissed: set[str] = set()
        self._failed: asyncio.Future[None] | None = None

    async def run(self, tls: ssl.SSLContext, *, address: str, port: int, listening: Callable[[int], object]) -> None:
        """`listening` hears the port. Raises what the host raises, such as for a disk that is full, `InUse` for a port
        that is taken, and `EnvironmentFault` where nothing can listen.
        """
        self._failed = asyncio.get_running_loop().create_future()
        app = web.Application(client_max_size=messages.MOST_MESSAGE_BYTES)
        app.add_routes(
            [
                web.post("/enrol", self._enrol),
                web.post("/join", self._known(Service._join)),
                web.post("/work", self._known(Service._work)),
                web.post("/alive", self._known(Service._alive)),
                web.get("/model/{version:[0-9]{1,9}}/{width:[0-9]{1,2}}", self._known(Service._model)),
                web.get("/upload/{version:[0-9]{1,9}}/{number:[0-9]{1,9}}", self._known(Service._uploaded)),
                web.put("/upload/{version:[0-9]{1,9}}/{number:[0-9]{1,9}}", self._known(Service._upload)),
                web.post("/secret/{version:[0-9]{1,9}}/{number:[0-9]{1,9}}", self._known(Service._secret)),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, read_bufsize=READ_BYTES)
        await runner.setup()
        try:
            site = web.TCPSite(runner, address, port, ssl_context=tls)
            try:
                await site.start()
            except OSError as error:
                kind = InUse if error.errno == errno.EADDRINUSE else EnvironmentFault
                why = os.strerror(error.errno or 0)
                raise kind(f"the server cannot listen on {address}:{port} ({why}): give another --port") from error
            listening(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
            await self._rounds()
        finally:
            await runner.cleanup()

    async def _rounds(self) -> None:
        """Lets time pass, and makes models when their contributions are there."""
        while not self.host.rounds.over:
            self._raise_failure()
            ready = self.host.tick()
            if ready is None:
                await asyncio.sleep(POLL_S / 4)
                continue
            self.host.advancing = True
            try:
                await asyncio.to_thread(self.host.compute, ready)
                row = self.host.finish(ready)
            finally:
                self.host.advancing = False
            self.on_round(row)
        await self._farewell()

    async def _farewell(self) -> None:
        """Waits until every client has heard that the run is over, or is silent for too long."""
        deadline_s, left = time.monotonic() + self.farewell_s, self._untold()
        if left:
            who = "1 client" if len(left) == 1 else f"{len(left)} clients"
            self.said(f"waiting for {who} to hear that the run is over; Ctrl-C ends this at once")
        try:
            while (left := self._untold()) or self._in_grace():
                if left and time.monotonic() > deadline_s:
                    return
                self._raise_failure()
                await asyncio.sleep(POLL_S / 4)
                self.host.tick()
        except asyncio.CancelledError:  # all models are made: nothing is lost but an answer
            if (task := asyncio.current_task()) is not None:
                task.uncancel()

    def _untold(self) -> set[str]:
        return self.host.rounds.present.keys() - self._dismissed

    def _in_grace(self) -> bool:
        return time.monotonic() - self._told_s < self.grace_s

    def _raise_failure(self) -> None:
        """Raises what went wrong with the host's files in a request."""
        if self._failed is not None and self._failed.done():
            self._failed.result()

    def _known(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler, for a client with a name. What goes wrong with the host's files ends the server."""

        async def handle(request: web.Request) -> web.StreamResponse:
            transport = request.transport
            client = None if transport is None else name_on(transport.get_extra_info("peercert"))
            if client is None:
                return _answer(messages.Refusal("a certificate without a name"), status=403)
            self.host.alive(client)
            try:
                return await handler(self, client, request)
            except (messages.BadMessage, Refused) as error:
                self.host.told(f"refused: client {client}: {error}")
                return _answer(messages.Refusal(str(error)[:1000]), status=400)
            except (ConnectionError, TimeoutError, asyncio.CancelledError, web.HTTPException):
                raise
            except Exception as error:
                if self._failed is not None and not self._failed.done():
                    self._failed.set_exception(error)
                raise web.HTTPServiceUnavailable from error

        return handle

    async def _enrol(self, request: web.Request) -> web.StreamResponse:
        """A certificate for whoever has a token, or a sentence."""
        if self.enrolment is None:
            return web.Response(status=404, text="this server enrols nobody: start it with --enrol")
        try:
            said = messages.decode(messages.ENROL, await messages.body_of(request.content, most=MOST_REQUEST_BYTES))
            asked = said.request.encode()
            content = redeem(self.enrolment, token=said.token, name=said.name, request=asked)
        except (messages.BadMessage, UsageError) as error:
            await asyncio.sleep(REFUSAL_S)  # a guess costs time
            self.host.told(f"refused: enrolment from {request.remote}: {error}")
            return web.Response(status=403, text=str(error))
        self.host.told(f"client {said.name} is enrolled")
        return web.Response(body=content, content_type="application/x-pem-file")

    async def _join(self, client: str, request: web.Request) -> web.StreamResponse:
        said = messages.decode(messages.JOIN, await request.read())
        answer = self.host.join(client, said)
        if isinstance(answer, messages.Refusal):
            self.host.told(f"refused: {answer.sentence}")
        return _answer(answer, status=409 if isinstance(answer, messages.Refusal) else 200)

    async def _work(self, client: str, request: web.Request) -> web.StreamResponse:
        answer = self.host.work(client)
        response = _answer(answer)
        if isinstance(answer, messages.Over):
            await response.prepare(request)
            await response.write_eof()
            if client not in self._dismissed:  # who has gone before the answer was sent asks again
                self._dismissed.add(client)
                self._told_s = time.monotonic()
        return response

    async def _alive(self, client: str, request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    async def _model(self, client: str, request: web.Request) -> web.StreamResponse:
        version, width = (int(request.match_info[name]) for name in ("version", "width"))
        path = self.host.store.model_path(version, width)
        if not path.is_file():
            return _answer(messages.Refusal("there is no model of this version any more"), status=404)
        try:
            start = request.http_range.start or 0
        except ValueError:
            raise web.HTTPRequestRangeNotSatisfiable from None
        self.host.row.down_bytes += max(0, path.stat().st_size - start)
        return web.FileResponse(path, chunk_size=1 << 20)

    async def _uploaded(self, client: str, request: web.Request) -> web.StreamResponse:
        ticket = _ticket(client, request)
        settled = self.host.settled(ticket)
        return _answer(settled if settled is not None else messages.Received(_size(self.host.store.part_path(ticket))))

    async def _upload(self, client: str, request: web.Request) -> web.StreamResponse:
        ticket, host = _ticket(client, request), self.host
        settled = host.settled(ticket)
        if settled is not None:
            return _answer(settled)
        if host.advancing or ticket in self._uploading:
            raise web.HTTPServiceUnavailable
        offset, total, digest = _asked(request)
        secret = host.secret
        if secret is not None:
            secret.server.check_vector(client)
        most = messages.largest_bytes(secret.expected() if secret is not None else host.largest())
        part = host.store.part_path(ticket)
        if total > most:
            sentence = f"client {client} would send {total} bytes: an update has {most} at most"
            return _answer(host.refuse(ticket, sentence), status=413)
        if offset != _size(part):
            return _answer(messages.Received(_size(part)), status=409)
        self._uploading.add(ticket)
        try:
            await _append(part, request, left=total - offset)
            if _size(part) < total:
                return _answer(messages.Received(_size(part)))
            if secret is not None:
                return await self._masked(ticket, part)
            sentence = await asyncio.to_thread(host.check, ticket, part, digest)
            if host.advancing:
                raise web.HTTPServiceUnavailable
            return _answer(host.refuse(ticket, sentence) if sentence is not None else host.count(ticket, digest))
        finally:
            self._uploading.discard(ticket)

    async def _masked(self, ticket: Ticket, part: Path) -> web.StreamResponse:
        secret = self.host.secret
        if secret is None or (ticket.version, ticket.number) != (secret.version, secret.attempt):
            part.unlink(missing_ok=True)
            return _answer(messages.Ended(False, "its round is over"))
        try:
            read = messages.read_frame(part, messages.UpdateHeader, lambda _: secret.expected())
            secret.server.take_vector(ticket.client, read.vectors["masked"].numpy(), self.host.clock())
        except messages.BadFrame as error:
            return _answer(self.host.refuse(ticket, f"client {ticket.client}: {error}"), status=400)
        finally:
            part.unlink(missing_ok=True)
        self.host.note_revealing()
        self.host.row.up_bytes += sum(p.nbytes for p in secret.expected())
        return _answer(messages.Wait(0.0))

    async def _secret(self, client: str, request: web.Request) -> web.StreamResponse:
        ticket, said = _ticket(client, request), messages.decode(messages.SAID, await request.read())
        secret = self.host.secret
        if secret is None or (ticket.version, ticket.number) != (secret.version, secret.attempt):
            settled = self.host.settled(ticket)
            return _answer(settled if settled is not None else messages.Ended(False, "its round is over"))
        if not self.host.advancing:
            secret.say(client, said, self.host.clock())
            self.host.note_revealing()
        found = secret.server.message_for(client)
        return _answer(found if found is not None else messages.Wait(POLL_S / 4))


def _answer(message: msgspec.Struct, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), status=status, content_type="application/msgpack")


def _ticket(client: str, request: web.Request) -> Ticket:
    return Ticket(client, int(request.match_info["version"]), int(request.match_info["number"]))


def _asked(request: web.Request) -> tuple[int, int, str]:
    """Offset, total and digest of an upload. Raises `BadMessage`."""
    query = request.query
    offset, total, digest = query.get("offset", ""), query.get("total", ""), query.get("digest", "")
    if not (offset.isdecimal() and total.isdecimal() and len(offset + total) < 30 and _DIGEST.fullmatch(digest)):
        raise messages.BadMessage("an upload says its offset, its length and its digest; this one does not")
    if int(offset) > int(total):
        raise messages.BadMessage(f"an upload of {total} bytes cannot go on at {offset}")
    return int(offset), int(total), digest


async def _append(path: Path, request: web.Request, *, left: int) -> None:
    """Adds the request's body to a file, `left` bytes at most; what came before an interruption stays.

    Raises `BadMessage` for more bytes, and `TimeoutError` for a client that stops in the middle.
    """
    with path.open("ab") as file:
        while True:
            async with asyncio.timeout(CHUNK_S):
                chunk = await request.content.readany()
            if not chunk:
                return
            left -= len(chunk)
            if left < 0:
                raise messages.BadMessage("an upload has more bytes than it said")
            file.write(chunk)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
