"""Each rank's log, `logs/rank-00000.log`: when, which rank, how serious, and what was said."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.escape import escape_controls
from shoal.observe.ending import Ending
from shoal.observe.sink import RunStart, Sink


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


def _rank_file(path: Path, rank: int) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
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
        self._log.info("%s: steps %d to %d", run.name, run.first_step, run.total_steps)

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
