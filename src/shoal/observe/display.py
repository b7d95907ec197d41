"""Who is told how the run goes: a terminal gets a live line, a pipe gets a line now and then, other ranks nothing.

The live display: two lines at the foot of a terminal, drawn four times a second by a thread of `rich`.

The thread takes the interpreter's lock while it draws, so it draws plain text, which costs a fraction of a millisecond.
The terminal's cursor is never hidden and no mode of it is changed: a run that dies at any moment, by whatever signal,
leaves nothing to restore.

A display whose words also go to the rank's log, so that nothing said on a terminal is lost with it.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.observe.progress import Progress

PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """Called by the training loop; `step` must cost it almost nothing."""

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """The run begins; `first_step` is the number of the first step it will do (1 in a fresh run)."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step, or an evaluation after it, is done; `values` must not change afterwards."""
        ...

    def note(self, text: str) -> None:
        """Says something once."""
        ...

    def warn(self, text: str) -> None:
        """Says something that somebody should look at."""
        ...

    def finish(self) -> None:
        """The run is over, however it ended; a second call does nothing."""
        ...


class SilentDisplay:
    """For the ranks that are not rank 0."""

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """Shows nothing."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""

    def warn(self, text: str) -> None:
        """Shows nothing: the rank's log has it."""

    def finish(self) -> None:
        """Shows nothing."""


class PlainDisplay:
    """Whole lines for pipes and CI: the first step, each evaluation, one every few seconds, and the last step."""

    def __init__(
        self, stream: TextIO, *, every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._progress: Progress | None = None
        self._printed_step = -1
        self._printed_s = -float("inf")

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """Prints the title and where the run starts."""
        self._progress = Progress(title, total_steps, first_step=first_step, clock=self._clock)
        resumed = "" if first_step <= 1 else f", resumed after step {first_step - 1}"
        self._say(f"{title}: {total_steps} steps{resumed}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the step if it is due."""
        if self._progress is None:
            return
        self._progress.update(step, values)
        if self._clock() - self._printed_s >= self._every_s or "loss/eval" in values:
            self._print_step()

    def note(self, text: str) -> None:
        """Prints a line."""
        self._say(text)

    def warn(self, text: str) -> None:
        """Prints a line that says it is a warning."""
        self._say(f"warning: {text}")

    def finish(self) -> None:
        """Prints the last step, unless that was done."""
        if self._progress is not None and self._progress.step != self._printed_step and self._progress.values:
            self._print_step()
        self._progress = None

    def _print_step(self) -> None:
        assert self._progress is not None
        self._printed_step, self._printed_s = self._progress.step, self._clock()
        self._say(self._progress.line())

    def _say(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a pipe that was closed, a full disk: no reason to end a run
            self._stream = io.StringIO()


def display_for(stream: TextIO, rank: int, *, plain: bool | None = None) -> Display:
    """Rank 0's display on `stream`; live on a terminal, plain elsewhere; `plain` decides instead where it is given."""
    if rank != 0:
        return SilentDisplay()
    if plain is None:
        plain = not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb"
    if plain:
        return PlainDisplay(stream)

    return LiveDisplay(stream)


REFRESHES_PER_S = 4
BAR_CELLS = 28


class LiveDisplay:
    """Progress, figures and time left, in place; notes and warnings scroll above them."""

    def __init__(self, stream: TextIO) -> None:
        self._console = _VisibleCursor(file=stream, force_terminal=True, highlight=False)
        self._progress: Progress | None = None
        self._live: Live | None = None

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """Opens the two lines. They are closed when the process exits, if `finish` was not called."""
        self.finish()
        self._progress = Progress(title, total_steps, first_step=first_step)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=REFRESHES_PER_S,
            vertical_overflow="crop",
            # What is printed goes above the live lines, but only if it was going to a terminal: never out of a pipe.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        atexit.register(self.finish)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Stores the values; the thread draws them when it is due."""
        if self._progress is not None:
            self._progress.update(step, values)

    def note(self, text: str) -> None:
        """Prints above the live lines."""
        self._console.print(Text(text))

    def warn(self, text: str) -> None:
        """Prints above the live lines, in yellow."""
        self._console.print(Text(f"warning: {text}", style="yellow"))

    def finish(self) -> None:
        """Draws the last step, and leaves it standing."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.finish)
            live.stop()

    def _draw(self) -> Text:
        progress = self._progress
        if progress is None:
            return Text("")
        filled = round(progress.share * BAR_CELLS)
        return Text.assemble(
            (progress.title, "bold"),
            "  ",
            ("━" * filled, "cyan"),
            ("━" * (BAR_CELLS - filled), "bright_black"),
            f"  {progress.position()}\n",
            ("  ".join(progress.measurements()), "default"),
            no_wrap=True,
            overflow="ellipsis",
        )


class _VisibleCursor(Console):
    """A console that does not hide the cursor, so that nothing has to bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class LoggedDisplay:
    """Passes everything to `display`, and what is said in words to `log` too."""

    def __init__(self, display: Display, log: logging.Logger) -> None:
        self._display, self._log = display, log

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        self._log.info("%s: steps %d to %d", title, first_step, total_steps)
        self._display.start(title, total_steps, first_step=first_step)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._display.step(step, values)

    def note(self, text: str) -> None:
        self._log.info("%s", text)
        self._display.note(text)

    def warn(self, text: str) -> None:
        self._log.warning("%s", text)
        self._display.warn(text)

    def finish(self) -> None:
        self._display.finish()
