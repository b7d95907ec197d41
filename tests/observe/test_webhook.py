"""Alerts to a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from shoal.assembly.failed_run import alerts
from shoal.errors import ConfigError
from shoal.observe.config import ObserveConfig
from shoal.observe.sink import Ending, RunStart
from shoal.observe.sinks import ATTEMPTS, MOST, WebhookSink


class Receiver:
    """What came, and how many requests are refused first."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self.refuse, self.garble, self.requests, self.port = 0, 0, 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/alerts"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests += 1
            if found.requests <= found.garble:
                self.wfile.write(b"nonsense\r\n\r\n")
                return
            refused = found.requests <= found.refuse
            if not refused:
                found.alerts.append(json.loads(body))
            self.send_response(503 if refused else 204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield found
    server.shutdown()
    server.server_close()


def sink(receiver: Receiver, notes: list[str], *, failures: bool = True) -> WebhookSink:
    made = WebhookSink(receiver.url, name="digits", failures=failures, note=notes.append)
    made.start(RunStart(name="digits", total_steps=10))
    return made


def test_warnings_and_a_failure_arrive_in_order(receiver: Receiver) -> None:
    """With the run's name, the step, and what was said."""
    hook = sink(receiver, notes := [])
    hook.record(3, {"loss/train": 1.0}, time_s=0.0)
    hook.warn("step 3 was not finite")
    hook.finish(Ending("diverged", "3 steps in a row were not finite"))
    assert [(a["run"], a["level"], a["text"], a["step"]) for a in receiver.alerts] == [
        ("digits", "warning", "step 3 was not finite", 3),
        ("digits", "failure", "3 steps in a row were not finite", 3),
    ]
    assert notes == []


def test_a_run_that_finished_is_no_alert(receiver: Receiver) -> None:
    """Nor is one that was stopped, nor a failure that the launcher tells of."""
    for failures, ending in ((True, Ending("finished")), (True, Ending("stopped")), (False, Ending("failed", "x"))):
        sink(receiver, [], failures=failures).finish(ending)
    assert receiver.alerts == []


def test_a_server_that_refuses_is_asked_again(receiver: Receiver) -> None:
    """503, then 204: one alert, and nobody is told."""
    receiver.refuse = ATTEMPTS - 1
    hook = sink(receiver, notes := [])
    hook.warn("a warning")
    hook.finish(Ending("finished"))
    assert (len(receiver.alerts), notes) == (1, [])


def test_a_server_that_takes_nothing_costs_one_note(receiver: Receiver) -> None:
    """However many alerts there are; and a flood is cut."""
    receiver.refuse = 10**6
    hook = sink(receiver, notes := [])
    for number in range(MOST + 50):
        hook.warn(f"warning {number}")
    hook.finish(Ending("finished"))
    (note,) = notes
    assert "takes no alerts" in note
    assert receiver.requests == MOST * ATTEMPTS


def test_an_answer_that_is_no_http_costs_one_note(receiver: Receiver) -> None:
    """The thread lives on, and the next alert arrives; the note has no token that is in the URL."""
    receiver.garble = ATTEMPTS
    notes: list[str] = []
    hook = WebhookSink(f"{receiver.url}?key=hidden", name="digits", failures=True, note=notes.append)
    hook.warn("lost")
    hook.warn("a warning")
    hook.finish(Ending("finished"))
    assert [alert["text"] for alert in receiver.alerts] == ["a warning"]
    (note,) = notes
    assert "takes no alerts (BadStatusLine" in note
    assert "hidden" not in note


NO_URLS = [
    "ftp://host/x",
    "file:///etc/passwd",
    "host:80",
    "http://",
    "http://[::1/",
    "http://host:port/",
    "http://host/a b",
    "http://user:password@host/",
]


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_that_is_not_http_is_refused(url: str) -> None:
    """With the key's name, when the run file is read."""
    with pytest.raises(ConfigError, match=r"observe\.webhook"):
        WebhookSink(url, name="x", failures=True, note=print)
    with pytest.raises(ValueError, match="webhook"):
        ObserveConfig(webhook=url)


def test_replicas_that_are_lost_or_join_are_alerts(receiver: Receiver) -> None:
    """With the step after which they did; a run that begins with all replicas says nothing."""
    sink = WebhookSink(receiver.url, name="digits", failures=False, note=str)
    sink.start(RunStart(name="digits", total_steps=9))
    sink.generation(RunStart(name="digits", total_steps=9, first_step=5, membership="1 of 2 replicas; rank 1 lost"))
    sink.finish(Ending("finished"))
    (alert,) = receiver.alerts
    assert (alert["level"], alert["text"], alert["step"]) == ("warning", "1 of 2 replicas; rank 1 lost", 4)


def test_a_launchers_warnings_are_alerts(receiver: Receiver) -> None:
    """All are sent when its block ends; without a webhook nothing is."""
    with alerts(receiver.url, "digits") as warn:
        warn("replica-1 is fenced: it hangs")
    assert [alert["text"] for alert in receiver.alerts] == ["replica-1 is fenced: it hangs"]
    with alerts(None, "digits") as warn:
        warn("nobody hears this")
