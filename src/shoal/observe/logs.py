"""Each rank's log, `logs/rank-00000.log`; the warnings of rank 0 also reach the terminal.

They go there through the display's `warn`, which prints above the live line and never into it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import EnvironmentFault


def log_path(run_directory: Path, rank: int) -> Path:
    """Where a rank's log lies."""
    return run_directory / "logs" / f"rank-{rank:05d}.log"


def open_log(
    run_directory: Path, *, rank: int, to_terminal: bool, warn: Callable[[str], None] | None = None
) -> logging.Logger:
    """A logger that appends to the rank's file, from INFO up.

    With `to_terminal`, warnings and errors also go to `warn` (a display's), or to standard error without one.
    Raises `EnvironmentFault` where the file cannot be opened.
    """
    # Not from logging.getLogger: its registry is global, and a second run of one process would write into both files.
    logger = logging.Logger(f"shoal.rank-{rank}", logging.INFO)
    logger.addHandler(_rank_file(log_path(run_directory, rank), rank))
    if to_terminal:
        logger.addHandler(_Terminal(warn or _to_standard_error))
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


class _Terminal(logging.Handler):
    """Hands the text of a warning or an error to somebody who may write on the terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.getMessage())
        except Exception:
            self.handleError(record)


def _to_standard_error(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
