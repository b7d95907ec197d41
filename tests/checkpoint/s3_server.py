"""An S3 server on loopback (moto), behind a relay that fails requests, answers slowly and kills who asks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.server import ThreadedMotoServer


@dataclass
class Strike:
    """SIGKILL for the process `pid`, which asks alone, at its request number `at`: before the store has it, or behind
    what the store did, before ("after") or in the middle of ("half") the answer.
    """

    pid: int
    at: int
    moment: str
    seen: int = 0

    def falls(self, moment: str) -> bool:
        """Whether the request that is being passed on is the one; then the process is gone."""
        self.seen += moment == "before"
        if (self.seen, moment) != (self.at, self.moment):
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True


@dataclass
class Trouble:
    """`failing`: the share of requests that get a 503; `slow_s`: what every other one takes longer."""

    failing: float = 0.0
    slow_s: float = 0.0
    strike: Strike | None = None
    failed: int = 0
    draws: random.Random = field(default_factory=lambda: random.Random(3))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def become(self, *, failing: float = 0.0, slow_s: float = 0.0) -> None:
        """From now on; counts anew."""
        self.failing, self.slow_s, self.failed, self.draws = failing, slow_s, 0, random.Random(3)
        self.strike = None

    def fails(self) -> bool:
        with self.lock:
            failing = self.draws.random() < self.failing
            self.failed += failing
            return failing

    def kills(self, moment: str) -> bool:
        """Whether the client of this request is dead now."""
        with self.lock:
            return self.strike is not None and self.strike.falls(moment)


@dataclass(frozen=True)
class S3:
    """A server with the bucket `copies`; `trouble` may be changed while it runs."""

    url: str
    trouble: Trouble

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of s3fs; its own retries are off, so that those of Shoal are what is tested."""
        return {
            "endpoint_url": self.url,
            "key": "test",
            "secret": "test",
            "config_kwargs": {"retries": {"max_attempts": 1, "mode": "standard"}, "s3": {"addressing_style": "path"}},
            "skip_instance_cache": True,
        }


@contextmanager
def s3_server() -> Iterator[S3]:
    """Serves until the end of the block."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")  # all servers share one state
    urllib.request.urlopen(reset).close()
    found = Trouble()
    relay = ThreadingHTTPServer(("127.0.0.1", 0), _relay_to(f"http://{host}:{port}", found))
    relay.daemon_threads = True
    thread = threading.Thread(target=relay.serve_forever, daemon=True)
    thread.start()
    try:
        served = S3(f"http://127.0.0.1:{relay.server_address[1]}", found)
        import fsspec

        fsspec.filesystem("s3", **served.options).mkdir("copies")
        yield served
    finally:
        relay.shutdown()
        relay.server_close()
        moto.stop()


def _relay_to(target: str, trouble: Trouble) -> type[BaseHTTPRequestHandler]:
    class Relay(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests count what they need."""

        def pass_on(self) -> None:
            content = self.body()
            if trouble.fails():
                return self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>reduce your rate</Message></Error>")
            time.sleep(trouble.slow_s)
            if trouble.kills("before"):
                self.close_connection = True
                return None
            dropped = ("host", "connection", "transfer-encoding", "expect")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            headers.setdefault("Content-Type", "application/octet-stream")  # urllib's own, a form, loses the body
            request = urllib.request.Request(
                target + self.path, data=content or None, headers=headers, method=self.command
            )
            try:
                with urllib.request.urlopen(request) as answer:
                    self.answer(answer.status, dict(answer.headers), answer.read())
            except urllib.error.HTTPError as error:
                self.answer(error.code, dict(error.headers), error.read())

        def body(self) -> bytes:
            """Of the request, whose length is told or which comes in chunks."""
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)

        def answer(self, code: int, headers: dict[str, str], content: bytes) -> None:
            if trouble.kills("after"):
                self.close_connection = True
                return
            self.send_response(code)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            if trouble.kills("half"):
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

    return Relay
