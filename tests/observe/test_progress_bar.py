"""Long work says how far it has come: in place on a terminal, line by line elsewhere."""

from __future__ import annotations

import io

import pytest

from shoal.observe.terminal import PlainProgressBar, ProgressBar, TerminalProgressBar, open_progress_bar, track
from tests.observe.streams import Clock, Terminal


def test_the_progress_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place on a terminal, plain lines in a pipe."""
    monkeypatch.setenv("TERM", "xterm")
    with open_progress_bar(Terminal()) as shown:
        assert isinstance(shown, TerminalProgressBar)
    assert isinstance(open_progress_bar(io.StringIO()), PlainProgressBar)


def test_a_pipe_gets_a_line_for_each_text() -> None:
    """Counts that move on under one text print nothing; what is unprintable is escaped."""
    stream = io.StringIO()
    with PlainProgressBar(stream) as shown:
        for done in range(3):
            shown.update("evaluating", done=done, total=3)
        shown.update("\x1b[2J")
    assert stream.getvalue() == "evaluating\n\\x1b[2J\n"


def test_a_pipe_hears_now_and_then_of_work_that_goes_on() -> None:
    """With the count and the time, every 15 s at most."""
    stream, clock = io.StringIO(), Clock()
    shown = PlainProgressBar(stream, clock=clock)
    for done in range(5):
        clock.now_s = 100.0 + 10.0 * done
        shown.update("pricing", done=done)
    shown.update("trying", total=2)
    assert stream.getvalue() == "pricing\npricing (2, 0:20)\npricing (4, 0:40)\ntrying\n"


def test_a_terminal_shows_count_time_and_text_in_one_line() -> None:
    """The line has all three, and is erased at the end, so that the result stands alone."""
    stream, clock = Terminal(), Clock()
    shown = TerminalProgressBar(stream, clock=clock)
    clock.now_s = 65.0
    shown.update("trying data=2", done=1, total=4)
    assert "1/4  1:05  trying data=2" in stream.getvalue()
    shown.close()
    shown.close()
    assert stream.getvalue().endswith("\x1b[2K")


def test_tracked_items_are_counted_as_they_are_taken() -> None:
    """All items come through, in order, each with the number of those before it."""
    heard: list[tuple[str, int, int]] = []

    class Heard(ProgressBar):
        def update(self, text: str, *, done: int = 0, total: int = 0) -> None:
            heard.append((text, done, total))

    assert list(track("abc", Heard(), "letters", total=3)) == ["a", "b", "c"]
    assert heard == [("letters", 0, 3), ("letters", 1, 3), ("letters", 2, 3)]


def test_nobody_need_listen() -> None:
    """The base class takes every call and shows nothing."""
    with ProgressBar() as shown:
        shown.update("working", done=1, total=2)
