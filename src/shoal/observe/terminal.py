"""Lines at the foot of a terminal that are drawn again in place.

A thread of `rich` draws them four times a second. It holds the interpreter's lock while it draws, so what it draws is
plain text, which costs a fraction of a millisecond. The cursor is never hidden and no mode of the terminal is changed:
a process that dies at any moment, by whatever signal, leaves nothing to restore.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal import units
from shoal.observe.events import read_events
from shoal.observe.goodput import goodput_of
from shoal.observe.sink import EVALUATING, Ending, RunStart, Sink
from shoal.observe.status import BETWEEN, Status
from shoal.standard_output import escape_controls

REFRESHES_PER_S = 4


def is_terminal(stream: TextIO) -> bool:
    """Whether lines of `stream` can be drawn again in place."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def bar_text(share: float, cells: int) -> Text:
    """A bar of which `share` (0 to 1) is filled; "" for no cells."""
    filled = round(min(1.0, max(0.0, share)) * cells)
    return Text().append("━" * filled, "cyan").append("━" * (cells - filled), "bright_black")


class LiveLines:
    """What `draw` gives for a width in columns, drawn in place between `open` and `close`; `say` prints above it."""

    def __init__(self, stream: TextIO, draw: Callable[[int], Text]) -> None:
        self._console = _VisibleCursor(file=stream, force_terminal=True, highlight=False)
        self._draw = draw
        self._live: Live | None = None

    def open(self) -> None:
        """Begins to draw; a second call does nothing. Ends by itself when the process exits."""
        if self._live is not None:
            return
        self._live = Live(
            console=self._console,
            get_renderable=lambda: self._draw(self._console.width),
            refresh_per_second=REFRESHES_PER_S,
            vertical_overflow="crop",
            # What is printed goes above the live lines, but only if it was going to a terminal: never out of a pipe.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        atexit.register(self.close)

    def close(self, *, erase: bool = False) -> None:
        """Draws a last time and leaves the lines standing, or erases them; a second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            live.transient = erase
            live.stop()

    def say(self, text: str, *, style: str = "") -> None:
        """Prints text, which must be safe for a terminal, above the lines."""
        self._console.print(Text(text, style=style))


class _VisibleCursor(Console):
    """A console that does not hide the cursor, so that nothing has to bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


# How far long work has come that is no training: `shoal verify`, `evaluate`, `plan --measure`.
#
#     with open_progress_bar(sys.stderr) as bar:
#         for number, plan in enumerate(plans):
#             bar.update(f"trying {plan}", done=number, total=len(plans))
#
# On a terminal it is one line in place with the time elapsed, which vanishes at the end; elsewhere a line for each
# thing that is said. It goes to standard error: standard output belongs to the result.


BAR_CELLS = 20
STILL_EVERY_S = 15.0
"""How often a pipe hears of work that goes on."""
T = TypeVar("T")


class ProgressBar:
    """Hears how far some work has come and shows nothing: for ranks other than 0, and where nobody asked."""

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """The work is now at `text`; `done` of `total` parts are behind it (a total of 0: not known)."""

    def close(self) -> None:
        """The work is over; a second call does nothing."""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainProgressBar(ProgressBar):
    """A line for each text that differs from the one before; where counts move on under one text, a line now and
    then.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._last, self._begun_s, self._said_s = "", 0.0, 0.0

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        now_s = self._clock()
        if text != self._last:
            self._last, self._begun_s, shown = text, now_s, text
        elif now_s - self._said_s >= STILL_EVERY_S:
            counted = f"{done}{f' of {total}' if total > 0 else ''}, " if done else ""
            shown = f"{text} ({counted}{units.clock(now_s - self._begun_s)})"
        else:
            return
        self._said_s = now_s
        print(escape_controls(shown, encoding=self._stream.encoding or "utf-8"), file=self._stream, flush=True)


class TerminalProgressBar(ProgressBar):
    """One line in place: a bar where the number of parts is known, the text, and the time elapsed."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._text, self._done, self._total = "", 0, 0
        self._clock, self._start_s = clock, clock()
        self._lines = LiveLines(stream, self._draw)

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        self._text, self._done, self._total = escape_controls(text), done, total
        self._lines.open()

    def close(self) -> None:
        self._lines.close(erase=True)

    def _draw(self, columns: int) -> Text:
        elapsed = units.clock(self._clock() - self._start_s)
        of = f"/{self._total}" if self._total > 0 else ""
        counted = f"{self._done}{of}{BETWEEN}" if self._done or of else ""
        line = f"{counted}{elapsed}{BETWEEN}{self._text}"
        cells = BAR_CELLS if self._total > 0 and len(line) + BAR_CELLS + len(BETWEEN) <= columns else 0
        drawn = Text(no_wrap=True, overflow="crop").append(bar_text(self._done / max(1, self._total), cells))
        return drawn.append(((BETWEEN if cells else "") + line)[: columns - cells])


def track(items: Iterable[T], bar: ProgressBar, text: str, *, total: int = 0) -> Iterator[T]:
    """`items` as they are; `bar` is told how many of them are done each time that one is asked for."""
    for done, item in enumerate(items):
        bar.update(text, done=done, total=total)
        yield item


def open_progress_bar(stream: TextIO) -> ProgressBar:
    """The progress for `stream`: in place where it is a terminal, plain lines elsewhere."""
    return TerminalProgressBar(stream) if is_terminal(stream) else PlainProgressBar(stream)


# What rank 0 shows: a live line on a terminal, a line now and then in a pipe.
#
# What others wrote (a sample, an error of the user's code) is shown with its control characters escaped.


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
        self._evaluated = False

    def start(self, run: RunStart) -> None:
        self._status = _status(run, self._run_directory, self._clock)
        resumed = "" if run.resumed_from is None else f", resumed after step {run.resumed_from}"
        length = "as many steps as its loop takes" if run.open_end else units.plural(run.total_steps, "step")
        self._say(f"{run.name}: {length}{resumed}")
        self._printed_s = -float("inf")

    def generation(self, run: RunStart) -> None:
        self._say(run.membership)
        if self._status is not None:
            self._status.membership = run.membership

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Prints the step where it is due or was evaluated. A loop may tell of an evaluation before the step is over:
        its line waits for the step's own values. That of the last step waits for what follows it.
        """
        if self._status is None:
            return
        self._status.update(step, values, time_s=time_s)
        self._evaluated |= "loss/eval" in values
        due = self._is_due() and step < self._status.run.total_steps
        if self._status.step == step and (self._evaluated or due):
            self._evaluated = False
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
            shown = over is None or over.step == self._printed_step or not over.values
            if over is not None and not shown and text != EVALUATING:  # whose figures stand in that line
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
