"""The sinks of a run: the one list of them."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from shoal.observe.config import ObserveConfig
from shoal.observe.displays import display_on
from shoal.observe.events import EventSink
from shoal.observe.logs import LogSink
from shoal.observe.report import ReportSink
from shoal.observe.sink import Sinks


def open_sinks(
    config: ObserveConfig, run_directory: Path, *, rank: int, stream: TextIO, reports_failure: bool = True
) -> Sinks:
    """The sinks of one rank. Every rank has its log and its events; rank 0 also the display on `stream` and the report.

    `reports_failure`: rank 0 writes the report of a failed run, too; False where a launcher does, which knows better
    which rank was the cause. Raises `EnvironmentFault` where the log cannot be opened.
    """
    sinks = Sinks(LogSink(run_directory, rank=rank))
    if rank == 0:
        sinks.add(display_on(stream, live=None if config.live else False))
    sinks.add(EventSink(run_directory, rank=rank, warn=sinks.warn))
    if rank == 0:
        sinks.add(ReportSink(run_directory, page=config.report, failures=reports_failure, note=sinks.note))
    return sinks
