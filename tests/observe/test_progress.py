"""Long work says how far it has come: in place on a terminal, line by line elsewhere."""

from __future__ import annotations

import io

import pytest

from shoal.observe.progress import PlainProgress, Progress, TerminalProgress, open_progress
from tests.observe.streams import Clock, Terminal


def test_the_progress_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place on a terminal, plain lines in a pipe."""
    monkeypatch.setenv("TERM", "xterm")
    with open_progress(Terminal()) as progress:
        assert isinstance(progress, TerminalProgress)
    assert isinstance(open_progress(io.StringIO()), PlainProgress)


def test_a_pipe_gets_a_line_for_each_text() -> None:
    """Counts that move on under one text print nothing; what is unprintable is escaped."""
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for done in range(3):
            progress.update("evaluating", done=done, total=3)
        progress.update("\x1b[2J")
    assert stream.getvalue() == "evaluating\n\\x1b[2J\n"


def test_a_terminal_shows_count_time_and_text_in_one_line() -> None:
    """The line has all three, and is erased at the end, so that the result stands alone."""
    stream, clock = Terminal(), Clock()
    progress = TerminalProgress(stream, clock=clock)
    clock.now_s = 65.0
    progress.update("trying data=2", done=1, total=4)
    assert "1/4  1:05  trying data=2" in stream.getvalue()
    progress.close()
    progress.close()
    assert stream.getvalue().endswith("\x1b[2K")


def test_nobody_need_listen() -> None:
    """The base class takes every call and shows nothing."""
    with Progress() as progress:
        progress.update("working", done=1, total=2)
