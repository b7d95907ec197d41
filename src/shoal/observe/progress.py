"""How far long work has come that is no training: `shoal verify`, `evaluate`, `plan --measure`.

    with open_progress(sys.stderr) as progress:
        for number, plan in enumerate(plans):
            progress.update(f"trying {plan}", done=number, total=len(plans))

On a terminal it is one line in place with the time elapsed, which vanishes at the end; elsewhere a line for each
thing that is said. It goes to standard error: standard output belongs to the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.text import Text

from shoal import units
from shoal.escape import escape_controls
from shoal.observe.status import BETWEEN
from shoal.observe.terminal import LiveLines, bar, is_terminal

BAR_CELLS = 20


class Progress:
    """Hears how far some work has come and shows nothing: for ranks other than 0, and where nobody asked."""

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """The work is now at `text`; `done` of `total` parts are behind it (0 of 0 where that is not known)."""

    def close(self) -> None:
        """The work is over; a second call does nothing."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainProgress(Progress):
    """A line for each text that differs from the one before; counts that move on under one text print nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        if text == self._last:
            return
        self._last = text
        print(escape_controls(text, encoding=self._stream.encoding or "utf-8"), file=self._stream, flush=True)


class TerminalProgress(Progress):
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
        counted = f"{self._done}/{self._total}{BETWEEN}" if self._total > 0 else ""
        line = f"{counted}{elapsed}{BETWEEN}{self._text}"
        cells = BAR_CELLS if self._total > 0 and len(line) + BAR_CELLS + len(BETWEEN) <= columns else 0
        drawn = Text(no_wrap=True, overflow="crop").append(bar(self._done / max(1, self._total), cells))
        return drawn.append(((BETWEEN if cells else "") + line)[: columns - cells])


def open_progress(stream: TextIO) -> Progress:
    """The progress for `stream`: in place where it is a terminal, plain lines elsewhere."""
    return TerminalProgress(stream) if is_terminal(stream) else PlainProgress(stream)
