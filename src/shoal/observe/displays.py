"""What rank 0 shows: a live line on a terminal, a line now and then in a pipe.

What others wrote (a sample, an error of the user's code) is shown with its control characters escaped.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from rich.text import Text

from shoal import units
from shoal.escape import escape_controls
from shoal.observe.ending import Ending
from shoal.observe.events import read_events
from shoal.observe.goodput import goodput_of
from shoal.observe.sink import RunStart, Sink
from shoal.observe.status import BETWEEN, Status
from shoal.observe.terminal import LiveLines, bar_text, is_terminal

PLAIN_EVERY_S = 5.0


def display_on(stream: TextIO, *, live: bool | None = None, run_directory: Path | None = None) -> Sink:
    """The display of rank 0 on `stream`: live where it is a terminal that can move its cursor, plain elsewhere, or as
    `live` says. `run_directory`: where the events of earlier attempts are."""
    live = is_terminal(stream) if live is None else live
    return (LiveDisplay if live else PlainDisplay)(stream, run_directory=run_directory)


def _status(run: RunStart, run_directory: Path | None, clock: Callable[[], float]) -> Status:
    if run.resumed_from is None or run_directory is None:
        return Status(run, clock=clock)
    return Status(run, earlier=goodput_of(read_events(run_directory)), clock=clock)


class PlainDisplay(Sink):
    """Whole lines for pipes and CI: the first step, evaluations, one every few seconds, the last step, a summary."""

    def __init__(
        self,
        stream: TextIO,
        *,
        run_directory: Path | None = None,
        every_s: float = PLAIN_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_directory = run_directory
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._status: Status | None = None
        self._printed_step = -1
        self._printed_s = -float("inf")

    def start(self, run: RunStart) -> None:
        self._status = _status(run, self._run_directory, self._clock)
        resumed = "" if run.resumed_from is None else f", resumed after step {run.resumed_from}"
        self._say(f"{run.name}: {units.plural(run.total_steps, 'step')}{resumed}")
        self._printed_s = -float("inf")

    def generation(self, run: RunStart) -> None:
        self._say(run.membership)
        if self._status is not None:
            self._status.membership = run.membership

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        if self._status is None:
            return
        self._status.update(step, values, time_s=time_s)
        if self._is_due() or "loss/eval" in values:
            self._print_step()

    def note(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def activity(self, text: str) -> None:
        """Prints it before the first step and after the last, where nothing else is printed; between them only where a
        line is due."""
        status = self._status
        over = status if status is not None and status.step >= status.run.total_steps else None
        if text and (status is None or over or self._is_due()):
            if over is not None and over.step != self._printed_step and over.values:
                self._print_step()
            self._say(text)
            self._printed_s = self._clock()

    def finish(self, ending: Ending) -> None:
        status, self._status = self._status, None
        if status is None:
            return
        if status.step != self._printed_step and status.values:
            self._say(status.line())
        self._say(status.summary(ending))

    def _is_due(self) -> bool:
        return self._clock() - self._printed_s >= self._every_s

    def _print_step(self) -> None:
        assert self._status is not None
        self._printed_step, self._printed_s = self._status.step, self._clock()
        self._say(self._status.line())

    def _say(self, text: str) -> None:
        try:
            self._stream.write(escape_controls(text, encoding=self._stream.encoding or "utf-8") + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a pipe that was closed, a full disk: no reason to end a run
            self._stream = io.StringIO()


class LiveDisplay(Sink):
    """Progress, measurements and time left, in place; notes and warnings scroll above them."""

    def __init__(
        self, stream: TextIO, *, run_directory: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_directory = run_directory
        self._lines = LiveLines(stream, self._draw)
        self._clock = clock
        self._status: Status | None = None
        self._before_start = ""
        self._since_s = 0.0

    def start(self, run: RunStart) -> None:
        self._status, self._before_start = _status(run, self._run_directory, self._clock), ""
        self._lines.open()

    def generation(self, run: RunStart) -> None:
        self._lines.say(run.membership)
        if self._status is not None:
            self._status.membership = run.membership

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Stores the values; the thread draws them when it is due."""
        if self._status is not None:
            self._status.update(step, values, time_s=time_s)

    def note(self, text: str) -> None:
        self._lines.say(escape_controls(text))

    def warn(self, text: str) -> None:
        self._lines.say(f"warning: {escape_controls(text)}", style="yellow")

    def activity(self, text: str) -> None:
        if self._status is not None:
            self._status.activity = escape_controls(text)
            return
        self._before_start, self._since_s = escape_controls(text), self._clock()
        if text:
            self._lines.open()

    def finish(self, ending: Ending) -> None:
        """Draws the last step and leaves it standing, with the summary below it."""
        status = self._status
        if status is not None:
            status.activity = ""
        self._lines.close(erase=status is None)
        self._status = None
        if status is not None:
            self._lines.say(status.summary(ending), style="bold" if ending.state == "finished" else "bold yellow")

    def _draw(self, columns: int) -> Text:
        status = self._status
        if status is None:
            waited = f"{BETWEEN}{units.clock(self._clock() - self._since_s)}" if self._before_start else ""
            return Text((self._before_start + waited)[:columns], no_wrap=True)
        title, position, measured = status.lines(columns)
        cells = status.bar_cells(columns, len(title) + len(position))
        drawn = Text(no_wrap=True, overflow="crop").append(title, "bold").append(bar_text(status.share, cells))
        return drawn.append((BETWEEN if cells else "") + position).append("\n" + "\n".join(measured))
