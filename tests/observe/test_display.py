"""A terminal, a pipe and the other ranks each get what is theirs."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from shoal.observe.display import Display, LiveDisplay, PlainDisplay, SilentDisplay, display_for
from shoal.observe.progress import Progress

VALUES = {
    "loss/train": 2.25,
    "lr": 1e-3,
    "throughput/tokens_per_second": 14_200.0,
    "time/step": 0.2,
    "time/sync_exposed": 0.01,
    "time/data": 0.001,
}


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_display_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live on rank 0's terminal, plain in a pipe or a dumb terminal, silent on other ranks; `plain` overrules."""
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display_for(Terminal(), 0), LiveDisplay)
    assert isinstance(display_for(io.StringIO(), 0), PlainDisplay)
    assert isinstance(display_for(Terminal(), 0, plain=True), PlainDisplay)
    assert isinstance(display_for(io.StringIO(), 0, plain=False), LiveDisplay)
    assert isinstance(display_for(Terminal(), 1, plain=False), SilentDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display_for(Terminal(), 0), PlainDisplay)


def test_plain_lines_are_few_and_end_with_the_last_step() -> None:
    """Of 100 steps at 1 a second: the title, the first, one each 5 seconds, the evaluation and the last."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, every_s=5.0, clock=clock)
    display.start("stdlib-gpt", 100, first_step=1)
    for step in range(1, 101):
        clock.now_s += 1.0
        display.step(step, VALUES)
    display.step(100, {"loss/eval": 2.5})
    display.finish()
    display.finish()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "stdlib-gpt: 100 steps"
    assert [line.split()[1] for line in lines[1:]] == [f"{step}/100" for step in [*range(1, 100, 5), 100]]
    assert "held out 2.500" in lines[-1]
    assert "\x1b" not in stream.getvalue()


def test_the_last_step_is_printed_although_it_was_not_due() -> None:
    """A run that ends between two lines still shows where it ended."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    display.start("run", 9, first_step=6)
    for step in (6, 7, 8):
        display.step(step, VALUES)
    display.finish()
    assert "resumed after step 5" in stream.getvalue()
    assert stream.getvalue().splitlines()[-1].startswith("step 8/9")


@pytest.mark.parametrize("make", [SilentDisplay, lambda: PlainDisplay(io.StringIO()), lambda: LiveDisplay(Terminal())])
def test_no_order_of_calls_is_an_error(make: type[Display]) -> None:
    """Steps before the start, a finish without one, a second finish: an error on the way must not cause another."""
    display = make()
    display.step(1, VALUES)
    display.finish()
    display.start("[bold]run", 0, first_step=1)
    display.note("[/nothing] closed")
    display.warn("late")
    display.step(1, {})
    display.finish()
    display.finish()


def test_time_left_is_the_pace_of_this_life() -> None:
    """Resumed after step 50 of 100, 10 steps in 20 s leave 40 steps and 80 s; before two steps nothing is claimed."""
    clock = Clock()
    progress = Progress("run", 100, first_step=51, clock=clock)
    progress.update(51, VALUES)
    assert progress.left_s() is None
    clock.now_s = 20.0
    progress.update(60, VALUES)
    assert progress.left_s() == pytest.approx(80.0)
    assert progress.position() == "step 60/100  1 min 20 s left"


def test_waiting_for_data_is_said_when_it_matters() -> None:
    """Below one percent of the step it is left out; exposed sync is always said."""
    progress = Progress("run", 10, first_step=1)
    progress.update(1, VALUES)
    assert progress.measurements()[-1] == "sync 5.0 %"
    progress.update(2, VALUES | {"time/data": 0.02})
    assert progress.measurements()[-1] == "data wait 10 %"


def test_an_evaluation_keeps_the_figures_of_the_step() -> None:
    """The held-out loss appears beside the training loss, and stays while later steps do not have it."""
    progress = Progress("run", 10, first_step=1)
    progress.update(1, VALUES)
    progress.update(1, {"loss/eval": 2.5})
    assert progress.measurements()[:2] == ["loss 2.250", "held out 2.500"]
    progress.update(2, VALUES | {"loss/train": 2.0})
    assert progress.measurements()[:2] == ["loss 2.000", "held out 2.500"]


PROGRAM = """
import sys, time
from shoal.observe.display import display_for
display = display_for(sys.stdout, 0)
display.start("stdlib-gpt", 900, first_step=1)
display.step(412, {"loss/train": 2.25})
display.note("a note")
time.sleep(0.6)
print("ready", flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError("broken")
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["raise", "kill"])
def test_a_terminal_is_left_as_it_was(end: str) -> None:
    """On a real terminal, with an exception or kill -9: no cursor hidden, no mode set, and the figures were there."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": "src", "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, end], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = _read(ours, until=b"ready" if end == "kill" else None)
    if end == "kill":
        process.send_signal(signal.SIGKILL)
    process.wait(timeout=20)
    os.close(ours)
    assert b"step 412/900" in output
    assert b"loss 2.250" in output
    assert b"a note" in output
    assert b"\x1b[?" not in output
    if end == "raise":
        assert b"RuntimeError: broken" in output
        assert output.endswith(b"\n")


def _read(descriptor: int, *, until: bytes | None) -> bytes:
    output, deadline_s = b"", time.monotonic() + 20
    while time.monotonic() < deadline_s and not (until and until in output):
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                output += os.read(descriptor, 65536)
            except OSError:  # the other side is closed
                break
    return output
