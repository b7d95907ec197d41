"""Notices that a host is about to be taken away: files, and metadata services that answer as the clouds' do."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.resilience.preemption import Preemption, notice_in, watching_for_preemption
from shoal.runfile.run_file import RunConfig
from tests.waiting import HANG_S


@contextmanager
def metadata(answers: list[tuple[int, str]], *, token: str = "") -> Iterator[str]:
    """The URL of a service that gives one answer after the other, the last one again and again; with `token`, to those
    who have fetched it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if token and self.headers.get("X-aws-ec2-metadata-token") != token:
                self._say(401, "")
                return
            self._say(*(answers.pop(0) if len(answers) > 1 else answers[0]))

        def do_PUT(self) -> None:
            good = self.path == "/latest/api/token" and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            self._say(200 if good else 400, token)

        def _say(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/notice"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def heard(file: str | None, url: str | None) -> tuple[str, list[str]]:
    """The notice that a watcher hears, and its warnings."""
    told: queue.SimpleQueue[Preemption] = queue.SimpleQueue()
    warned: list[str] = []
    with watching_for_preemption(file, url, told=told.put, warn=warned.append, poll_s=0.01):
        sentence = told.get(timeout=HANG_S).sentence
    return sentence, warned


def test_a_file_that_appears_is_a_notice(tmp_path: Path) -> None:
    """Its first line is the reason; an empty one and one that cannot be read count too."""
    file = tmp_path / "notice"
    assert notice_in(str(file), None) is None
    file.write_text("maintenance at noon\nmore")
    assert str(notice_in(str(file), None)).endswith("notice is there (maintenance at noon)")
    file.write_text("")
    assert str(notice_in(str(file), None)).endswith("notice is there")
    file.unlink()
    file.mkdir()
    assert notice_in(str(file), None) is not None


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_metadata_service_is_asked_until_it_has_a_notice(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """404, FALSE and NONE are none; a service that fails is warned of once, and asked again. No proxy is asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    nothing = [(404, ""), (200, "FALSE"), (200, "NONE\n"), (500, ""), (500, "")]
    with metadata([*nothing, (200, '{"action": "terminate"}')], token=token) as url:
        sentence, warned = heard(None, url)
    assert sentence.endswith("""says '{"action": "terminate"}'""")
    assert len(warned) == 1
    assert "cannot be asked (HTTP Error 500" in warned[0]


def test_a_service_that_is_not_there_is_warned_of_once(tmp_path: Path) -> None:
    """The file beside it is looked at all the same."""
    file = tmp_path / "notice"
    warned: list[str] = []
    told: queue.SimpleQueue[Preemption] = queue.SimpleQueue()

    def warn(text: str) -> None:
        warned.append(text)
        file.write_text("")

    url = "http://127.0.0.1:9/none"
    with watching_for_preemption(str(file), url, told=told.put, warn=warn, poll_s=0.01):
        assert "notice is there" in told.get(timeout=HANG_S).sentence
    assert len(warned) == 1


def test_an_answer_that_is_no_http_is_warned_of(tmp_path: Path) -> None:
    """The watch goes on: a notice that comes later is heard."""
    notice = tmp_path / "notice"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-none\r\n")
            notice.write_text("maintenance")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        sentence, warned = heard(str(notice), f"http://127.0.0.1:{server.getsockname()[1]}/notice")
        thread.join()
    assert "maintenance" in sentence
    assert len(warned) == 1
    assert "cannot be asked (BadStatusLine" in warned[0]


def test_what_is_no_url_is_refused() -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match="is no URL of HTTP"):
        RunConfig(name="own", steps=1, preemption_url="metadata.google.internal")
