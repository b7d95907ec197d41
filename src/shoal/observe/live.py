"""The live display: two lines at the foot of a terminal, drawn four times a second by a thread of `rich`.

The thread takes the interpreter's lock while it draws, so it draws plain text, which costs a fraction of a millisecond.
The terminal's cursor is never hidden and no mode of it is changed: a run that dies at any moment, by whatever signal,
leaves nothing to restore.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from shoal.observe.progress import Progress

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
