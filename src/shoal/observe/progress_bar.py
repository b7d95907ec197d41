"""How far long work has come that is no training: `shoal verify`, `evaluate`, `plan --measure`.

    with open_progress_bar(sys.stderr) as bar:
        for number, plan in enumerate(plans):
            bar.update(f"trying {plan}", done=number, total=len(plans))

On a terminal it is one line in place with the time elapsed, which vanishes at the end; elsewhere a line for each
thing that is said. It goes to standard error: standard output belongs to the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TextIO, TypeVar

from rich.text import Text

from shoal import units
from shoal.escape import escape_controls
from shoal.observe.status import BETWEEN
from shoal.observe.terminal import LiveLines, bar_text, is_terminal

BAR_CELLS = 20
T = TypeVar("T")


class ProgressBar:
    """Hears how far some work has come and shows nothing: for ranks other than 0, and where nobody asked."""

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """The work is now at `text`; `done` of `total` parts are behind it (a total of 0: not known)."""

    def close(self) -> None:
        """The work is over; a second call does nothing."""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PlainProgressBar(ProgressBar):
    """A line for each text that differs from the one before; counts that move on under one text print nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
        if text == self._last:
            return
        self._last = text
        print(escape_controls(text, encoding=self._stream.encoding or "utf-8"), file=self._stream, flush=True)


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
