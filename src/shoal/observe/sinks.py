"""The sinks of a run: the one list of them."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO
from urllib.parse import urlsplit

from shoal.errors import ConfigError, EnvironmentFault
from shoal.observe.config import ObserveConfig, require_webhook_url
from shoal.observe.events import EventSink
from shoal.observe.prometheus import PrometheusSink
from shoal.observe.report import ReportSink
from shoal.observe.sink import Ending, RunStart, Sink, Sinks
from shoal.observe.terminal import display_on
from shoal.observe.trackers import mlflow_sink, tensorboard_sink, wandb_sink
from shoal.standard_output import escape_controls

# Each rank's log, `logs/rank-00000.log`: when, which rank, how serious, and what was said.


def log_path(run_directory: Path, rank: int) -> Path:
    """Where a rank's log lies."""
    return run_directory / "logs" / f"rank-{rank:05d}.log"


def open_log(run_directory: Path, *, rank: int) -> logging.Logger:
    """A logger that appends to the rank's file, from INFO up. Raises `EnvironmentFault` where it cannot be opened."""
    # Not from logging.getLogger: its registry is global, and a second run of one process would write into both files.
    logger = logging.Logger(f"shoal.rank-{rank}", logging.INFO)
    logger.addHandler(_rank_file(log_path(run_directory, rank), rank))
    return logger


def close_log(logger: logging.Logger) -> None:
    """Flushes and closes the files of a logger; it says nothing from then on."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class _LogFile(logging.FileHandler):
    """A file that a full disk keeps waiting: its lines are written when there is room again. What is said about the run
    is on the terminal, too, and that the disk is full is said by those who write events and checkpoints.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where a line could not be written; logging's own way is a traceback for each."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _rank_file(path: Path, rank: int) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as fault:
        raise EnvironmentFault(
            f"{path} cannot be opened for writing: {fault.strerror}; "
            "make the run directory writable, or choose another with run.directory"
        ) from fault
    form = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ  rank {rank}  %(levelname)-7s  %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    form.converter = time.gmtime
    handler.setFormatter(form)
    return handler


class LogSink(Sink):
    """Writes what is said about a run, its start and its ending into the rank's log."""

    def __init__(self, run_directory: Path, *, rank: int) -> None:
        """Raises `EnvironmentFault` where the log cannot be opened."""
        self._log = open_log(run_directory, rank=rank)

    def start(self, run: RunStart) -> None:
        last = "an open end" if run.open_end else run.total_steps
        self._log.info("%s: steps %d to %s", run.name, run.first_step, last)

    def generation(self, run: RunStart) -> None:
        self._log.info("generation %d: %s", run.generation, run.membership)

    def note(self, text: str) -> None:
        self._log.info("%s", escape_controls(text))

    def warn(self, text: str) -> None:
        self._log.warning("%s", escape_controls(text))

    def activity(self, text: str) -> None:
        if text:
            self._log.info("%s", escape_controls(text))

    def finish(self, ending: Ending) -> None:
        """Writes the ending and closes the file: what is said later is lost."""
        level = logging.INFO if ending.state in ("finished", "stopped") else logging.ERROR
        self._log.log(level, "%s", f"{ending.state}: {escape_controls(ending.cause)}".removesuffix(": "))
        close_log(self._log)


# Alerts to a URL: every warning of a run, replicas that are lost or join, and an end that is no success, each as one
# POST of a small JSON object.
#
#     {"run": "digits", "level": "warning", "text": "...", "time": 1760000000.5, "step": 120}
#
# `level` is "warning" or "failure". Alerts are sent from a thread, each tried three times; one that cannot be delivered
# is noted once, and costs the run nothing else. At most `MOST` a start are sent, so that a warning in every step does
# not become a flood.


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


def open_sinks(
    config: ObserveConfig,
    run_directory: Path,
    *,
    rank: int,
    stream: TextIO,
    reports_failure: bool = True,
    host_ranks: Sequence[int] | None = None,
) -> Sinks:
    """The sinks of one rank. Every rank has its log and its events; rank 0 also the display on `stream`, the report,
    and what goes to TensorBoard, MLflow and Weights & Biases; each host's first rank has the endpoint for Prometheus.

    `reports_failure`: rank 0 writes the report of a failed run, too; False where a launcher does, which knows better
    which rank was the cause. `host_ranks`: the ranks of this host; None: all, and rank 0 is the first. Raises
    `EnvironmentFault` where the log cannot be opened, `MissingExtra` where a package is missing.
    """
    sinks = Sinks(LogSink(run_directory, rank=rank))
    if rank == 0:
        sinks.add(display_on(stream, live=None if config.live else False, run_directory=run_directory))
    sinks.add(EventSink(run_directory, rank=rank, warn=sinks.warn))
    if config.prometheus_port is not None and rank == (min(host_ranks) if host_ranks else 0):
        address = (config.prometheus_host, config.prometheus_port)
        sinks.add(PrometheusSink(run_directory, address, ranks=host_ranks, note=sinks.note, warn=sinks.warn))
    if rank == 0 and config.tensorboard:
        sinks.add(tensorboard_sink(run_directory, warn=sinks.warn))
    if rank == 0 and config.mlflow is not None:
        sinks.add(mlflow_sink(config.mlflow, run_directory, warn=sinks.warn))
    if rank == 0 and config.wandb != "off":
        sinks.add(wandb_sink(run_directory, mode=config.wandb, warn=sinks.warn))
    if rank == 0 and config.webhook is not None:
        name = run_directory.name
        sinks.add(WebhookSink(config.webhook, name=name, failures=reports_failure, note=sinks.note))
    if rank == 0:
        sinks.add(
            ReportSink(
                run_directory, page=config.report, failures=reports_failure, note=sinks.note, activity=sinks.activity
            )
        )
    return sinks
