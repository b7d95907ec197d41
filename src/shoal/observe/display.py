"""The displays under their first names, for callers that do not use `shoal.observe.sinks.open_sinks` yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TextIO

from shoal.observe.displays import display_on
from shoal.observe.ending import Ending
from shoal.observe.sink import RunStart, Sink


class Display:
    """Calls a sink from the five methods that the training loop knows."""

    def __init__(self, sink: Sink, log: logging.Logger | None = None) -> None:
        self._sink, self._log = sink, log
        self._step = self._total_steps = 0

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        self._step, self._total_steps = first_step - 1, total_steps
        self._sink.start(RunStart(name=title, total_steps=total_steps, first_step=first_step))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._sink.record(step, values, time_s=time.time())

    def note(self, text: str) -> None:
        if self._log is not None:
            self._log.info("%s", text)
        self._sink.note(text)

    def warn(self, text: str) -> None:
        if self._log is not None:
            self._log.warning("%s", text)
        self._sink.warn(text)

    def finish(self) -> None:
        self._sink.finish(Ending("finished" if self._step >= self._total_steps else "stopped"))


class SilentDisplay(Display):
    """For the ranks that are not rank 0."""

    def __init__(self) -> None:
        super().__init__(Sink())


class LoggedDisplay(Display):
    """Passes everything to `display`, and what is said in words to `log` too."""

    def __init__(self, display: Display, log: logging.Logger) -> None:
        super().__init__(display._sink, log)


def display_for(stream: TextIO, rank: int, *, plain: bool | None = None) -> Display:
    """Rank 0's display on `stream`; `plain` decides where it is given."""
    return SilentDisplay() if rank != 0 else Display(display_on(stream, live=None if plain is None else not plain))
