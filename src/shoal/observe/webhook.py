"""Alerts to a URL: every warning of a run, replicas that are lost or join, and an end that is no success, each as one
POST of a small JSON object.

    {"run": "digits", "level": "warning", "text": "...", "time": 1760000000.5, "step": 120}

`level` is "warning" or "failure". Alerts are sent from a thread, each tried three times; one that cannot be delivered
is noted once, and costs the run nothing else. At most `MOST` a start are sent, so that a warning in every step does
not become a flood.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from shoal.errors import ConfigError
from shoal.observe.config import require_webhook_url
from shoal.observe.ending import Ending
from shoal.observe.sink import RunStart, Sink

ATTEMPTS, TIMEOUT_S, FINISH_S = 3, 5.0, 20.0
MOST = 100
MOST_CHARACTERS = 2000

Level = Literal["warning", "failure"]


def check_url(url: str) -> str:
    """`url`, if it is one of HTTP. Raises `ConfigError`."""
    try:
        require_webhook_url(url)
    except ValueError as error:
        raise ConfigError(f"observe.{error}") from error
    return url


def post(url: str, *, run: str, level: Level, text: str, step: int) -> None:
    """One alert, tried `ATTEMPTS` times. Raises `OSError` after the last."""
    alert = {"run": run, "level": level, "text": text[:MOST_CHARACTERS], "time": time.time(), "step": step}
    request = urllib.request.Request(
        url, data=json.dumps(alert).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return
        except OSError:
            if attempt == ATTEMPTS:
                raise
        except (http.client.HTTPException, ValueError) as error:  # an answer that is no HTTP; a redirect to no URL
            if attempt == ATTEMPTS:
                raise OSError(f"{type(error).__name__}: {error}") from error


class WebhookSink(Sink):
    """Sends what is to be acted on. `note` hears once that alerts do not arrive.

    `failures`: also how the run ended; False where a launcher does that, which sees more ends than a rank.
    """

    def __init__(self, url: str, *, name: str, failures: bool, note: Callable[[str], None]) -> None:
        self._url, self._name, self._failures, self._note = check_url(url), name, failures, note
        self._step, self._sent, self._told = 0, 0, False
        self._alerts: queue.SimpleQueue[tuple[Level, str, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shoal-webhook", daemon=True)
        self._thread.start()

    def start(self, run: RunStart) -> None:
        self.generation(run)

    def generation(self, run: RunStart) -> None:
        self._step = run.first_step - 1
        if run.membership:
            self._put("warning", run.membership)

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        self._step = step

    def warn(self, text: str) -> None:
        self._put("warning", text)

    def finish(self, ending: Ending) -> None:
        if self._failures and ending.state in ("failed", "diverged"):
            self._put("failure", ending.cause)
        self._alerts.put(None)
        self._thread.join(FINISH_S)

    def _put(self, level: Level, text: str) -> None:
        if self._sent < MOST:
            self._sent += 1
            self._alerts.put((level, text, self._step))

    def _work(self) -> None:
        while (alert := self._alerts.get()) is not None:
            level, text, step = alert
            try:
                post(self._url, run=self._name, level=level, text=text, step=step)
            except OSError as error:
                if not self._told:
                    self._told = True
                    host = urlsplit(self._url).hostname  # the rest of the URL may be a secret
                    self._note(f"observe.webhook: {host} takes no alerts ({error}); the log has them")
