"""Lines at the foot of a terminal that are drawn again in place.

A thread of `rich` draws them four times a second. It holds the interpreter's lock while it draws, so what it draws is
plain text, which costs a fraction of a millisecond. The cursor is never hidden and no mode of the terminal is changed:
a process that dies at any moment, by whatever signal, leaves nothing to restore.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

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
