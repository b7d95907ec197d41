"""Serves the page: one HTML file with its script and style, the snapshot as JSON, and a line when there is a new one.

Whoever opens the page shows the token once, in the address; from then on a cookie does, which no script can read and no
other site can send. Without `token`, everybody who reaches the port may look. Nothing is ever changed by a request.

    GET /            the page                         GET /snapshot   what it shows, JSON
    GET /events      server-sent events: the number of the newest snapshot, when it changes

`page_beside` serves it in a thread of the process that starts the ranks, for as long as they run.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import EnvironmentFault, InUse, MissingExtra
from shoal.observe.facts import differing_keys
from shoal.page.live_run import LiveRun, RunSnapshot

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


ASSETS = Path(__file__).with_name("assets")
POLL_S = 1.0
LOOK_S = 0.25
HEARTBEAT_S = 15.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Snapshot(msgspec.Struct, frozen=True):
    """All runs, and the keys of their run files that differ, with each run's value."""

    version: int
    runs: list[RunSnapshot]
    differing: dict[str, list[Any]]


class Follower:
    """Polls the runs in a thread of its own, and keeps the newest snapshot as JSON."""

    def __init__(self, runs: Sequence[LiveRun], *, poll_s: float = POLL_S) -> None:
        self.version = 0
        self.json = b""
        self._runs, self._poll_s = list(runs), poll_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shoal-watch", daemon=True)

    def poll(self) -> None:
        """Takes in what is new, and makes a snapshot of it."""
        changed = [run.poll() for run in self._runs]
        if any(changed) or not self.json:
            self.version += 1
            differing = differing_keys([run.settings for run in self._runs])
            snapshot = Snapshot(self.version, [run.snapshot() for run in self._runs], differing)
            self.json = msgspec.json.encode(snapshot, enc_hook=str)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self.poll()
            if not any(run.unread_bytes for run in self._runs):
                self._stopping.wait(self._poll_s)


def open_page(follower: Follower, *, token: str | None) -> Starlette:
    """The application. Raises `MissingExtra` without starlette."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.gzip import GZipMiddleware
        from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtra("starlette", extra="page", purpose="shoal watch") from error

    def guarded(answer: Callable[[Request], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            shown = request.query_params.get("token")
            if token is not None and shown is not None and _same(shown, token):
                response: Response = RedirectResponse("/", status_code=303)
                response.set_cookie(_cookie(request), token, httponly=True, samesite="strict")
            elif token is not None and not _same(request.cookies.get(_cookie(request), ""), token):
                response = Response("Open the address that 'shoal watch' printed: it holds the token.\n", 403)
            else:
                response = answer(request)
            response.headers.update(HEADERS)
            return response

        return endpoint

    def asset(name: str, media_type: str) -> Any:
        return guarded(lambda _: FileResponse(ASSETS / name, media_type=media_type))

    def snapshot(_: Request) -> Response:
        return Response(follower.json or b'{"version":0,"runs":[],"differing":{}}', media_type="application/json")

    def events(request: Request) -> Response:
        return StreamingResponse(_versions(follower, request), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/", asset("page.html", "text/html")),
            Route("/page.css", asset("page.css", "text/css")),
            Route("/page.js", asset("page.js", "text/javascript")),
            Route("/snapshot", guarded(snapshot)),
            Route("/events", guarded(events)),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)],
    )


def serve(runs: Sequence[LiveRun], listener: socket.socket, *, token: str | None) -> None:
    """Serves until a signal comes. Raises `MissingExtra` without starlette and uvicorn."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", extra="page", purpose="shoal watch") from error
    with Follower(runs) as follower:
        application = open_page(follower, token=token)
        config = uvicorn.Config(application, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`, port 0 being any that is free.

    Raises `InUse` for a port that is taken, `EnvironmentFault` where nothing can listen there.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == 98
        kind = InUse if taken else EnvironmentFault
        repair = (
            "choose another port, or 0 for any that is free (--port, observe.page_port)"
            if taken
            else "give an address of this host"
        )
        raise kind(f"nothing can listen at {host}:{port} ({error}): {repair}") from error
    return listener


def _cookie(request: Request) -> str:
    """Cookies of one host are shared by its ports: each page has its own."""
    return f"shoal-watch-{request.url.port}"


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode(), token.encode())


async def _versions(follower: Follower, request: Request) -> AsyncIterator[str]:
    told, quiet_s = -1, 0.0
    while not await request.is_disconnected():
        if follower.version != told:
            told, quiet_s = follower.version, 0.0
            yield f"data: {told}\n\n"
        elif quiet_s >= HEARTBEAT_S:
            quiet_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(LOOK_S)
        quiet_s += LOOK_S


HOST = "127.0.0.1"
BESIDE_POLL_S = 2.0
"""The ranks need the cores more than the page does."""


@contextmanager
def page_beside(directory: Path, *, port: int, say: Callable[[str], None]) -> Iterator[str]:
    """Serves the page of the run in `directory`, which may only be about to begin, on loopback; port 0: any that is
    free. Gives the address, token included, after `say` has heard of it.

    Raises `InUse` for a port that is taken, `MissingExtra` without starlette and uvicorn.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", extra="page", purpose="observe.page") from error
    token = secrets.token_urlsafe(24)
    with Follower([LiveRun(directory, begun=False)], poll_s=BESIDE_POLL_S) as follower:
        application = open_page(follower, token=token)
        with listen(HOST, port) as listener:
            config = uvicorn.Config(application, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="shoal-page", daemon=True)
            thread.start()
            address = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"
            say(f"live page: {address}")
            try:
                yield address
            finally:
                server.should_exit = True
                thread.join()
