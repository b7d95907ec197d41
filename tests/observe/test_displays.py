"""A terminal shows a live line, a pipe a line now and then, and neither is harmed by what it shows."""

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

from shoal.observe.sink import EVALUATING, Ending, RunStart, Sink
from shoal.observe.terminal import LiveDisplay, PlainDisplay, display_on
from tests.observe.streams import VALUES, Clock, Terminal
from tests.waiting import HANG_S

FINISHED = Ending("finished")


def test_the_display_follows_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live on a terminal, plain in a pipe or a dumb terminal; `live` decides instead where it is given."""
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display_on(Terminal()), LiveDisplay)
    assert isinstance(display_on(io.StringIO()), PlainDisplay)
    assert isinstance(display_on(Terminal(), live=False), PlainDisplay)
    assert isinstance(display_on(io.StringIO(), live=True), LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display_on(Terminal()), PlainDisplay)


def test_plain_lines_are_few_and_end_with_a_summary() -> None:
    """Of 100 steps at 1 a second: the title, the first, one each 5 seconds, the evaluation, and the summary."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, every_s=5.0, clock=clock)
    display.start(RunStart(name="stdlib-gpt", total_steps=100))
    for step in range(1, 101):
        clock.now_s += 1.0
        display.record(step, VALUES, time_s=0.0)
    display.record(100, {"loss/eval": 2.5}, time_s=0.0)
    display.finish(FINISHED)
    display.finish(FINISHED)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "stdlib-gpt: 100 steps"
    assert [line.split()[1] for line in lines[1:-1]] == [f"{step}/100" for step in [*range(1, 100, 5), 100]]
    assert "held out 2.500" in lines[-2]
    assert lines[-1].startswith("finished: 100 steps in 1 min 40 s")
    assert "\x1b" not in stream.getvalue()


def test_an_evaluation_is_shown_with_the_figures_of_its_step() -> None:
    """A script's own loop tells of it before the step is over; its line waits for the step's values."""
    stream = io.StringIO()
    display = PlainDisplay(stream, clock=Clock())
    display.start(RunStart(name="run", total_steps=9, epoch_samples=100))
    display.record(1, VALUES | {"samples/consumed": 50.0}, time_s=0.0)
    display.record(2, {"loss/eval": 2.5}, time_s=0.0)
    display.record(2, VALUES | {"samples/consumed": 100.0}, time_s=0.0)
    display.record(3, VALUES | {"samples/consumed": 150.0}, time_s=0.0)
    shown = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in shown] == ["1/9", "2/9"]
    assert "held out 2.500" in shown[1]
    assert "epoch 1.00" in shown[1]


def test_the_last_step_is_printed_although_it_was_not_due() -> None:
    """A run that ends between two lines still shows where it ended."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    display.start(RunStart(name="run", total_steps=9, first_step=6))
    for step in (6, 7, 8):
        display.record(step, VALUES, time_s=0.0)
    display.finish(Ending("stopped"))
    assert "resumed after step 5" in stream.getvalue()
    assert stream.getvalue().splitlines()[-2].startswith("step 8/9")


def test_what_happens_before_the_first_step_is_said() -> None:
    """A pipe hears of every activity before the start, and later only where a line is due."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    display.activity("waiting for 4 ranks")
    display.activity("building the model")
    display.start(RunStart(name="run", total_steps=9))
    display.record(1, VALUES, time_s=0.0)
    display.activity("evaluating")
    clock.now_s = 6.0
    display.activity("saving")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == [
        "waiting", "building", "run:", "step", "saving",
    ]  # fmt: skip


def test_what_happens_after_the_last_step_is_said() -> None:
    """A pipe hears of every activity after the last step, below that step's line, which stands there once."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, clock=clock)
    display.start(RunStart(name="run", total_steps=2))
    display.record(1, VALUES, time_s=0.0)
    display.record(2, VALUES, time_s=0.0)
    display.activity("waiting until the checkpoint is written")
    display.activity("")
    display.activity("writing the report")
    display.finish(FINISHED)
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == [
        "run:", "step", "step", "waiting", "writing", "finished:",
    ]  # fmt: skip


def test_a_live_line_shows_what_happens_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activity has a line with the seconds it takes, which leaves nothing behind when the run starts."""
    stream = Terminal()
    display = LiveDisplay(stream)
    display.activity("building the model")
    assert "building the model  0:00" in stream.getvalue()
    display.finish(FINISHED)
    assert stream.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("make", [Sink, lambda: PlainDisplay(io.StringIO()), lambda: LiveDisplay(Terminal())])
def test_no_order_of_calls_is_an_error(make: type[Sink]) -> None:
    """Steps before the start, a finish without one, a second finish: an error on the way must not cause another."""
    display = make()
    display.record(1, VALUES, time_s=0.0)
    display.activity("")
    display.finish(FINISHED)
    display.start(RunStart(name="[bold]run", total_steps=0))
    display.note("[/nothing] closed")
    display.warn("late")
    display.record(1, {}, time_s=0.0)
    display.finish(FINISHED)
    display.finish(FINISHED)


def test_what_others_wrote_obeys_nobody() -> None:
    """Escape sequences of a sample or an error are shown, not sent to the terminal; a pipe gets what it can encode."""
    evil = "\x1b]0;owned\x07 caf\u00e9\u202e"
    for display, stream in ((PlainDisplay(s := io.StringIO()), s), (LiveDisplay(t := Terminal()), t)):
        display.note(evil)
        display.warn(evil)
        assert "\x1b]0;" not in stream.getvalue()
        assert stream.getvalue().count("\\x1b]0;owned\\x07 caf\u00e9\\u202e") == 2
    ascii_pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    narrow = PlainDisplay(ascii_pipe)
    narrow.note("caf\u00e9")
    narrow.note("still here")
    ascii_pipe.seek(0)
    assert ascii_pipe.read() == "caf\\xe9\nstill here\n"


PROGRAM = """
import sys, time
from shoal.observe.terminal import display_on
from shoal.observe.sink import RunStart
display = display_on(sys.stdout)
display.start(RunStart(name="stdlib-gpt", total_steps=900))
display.record(412, {"loss/train": 2.25}, time_s=0.0)
display.note("a note")
print("ready", flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError("broken")
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["raise", "kill"])
@pytest.mark.parametrize("columns", ["40", "100"])
def test_a_terminal_is_left_as_it_was(end: str, columns: str) -> None:
    """On a real terminal, with an exception or kill -9: no cursor hidden, no mode set, and step and loss were there."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": "src", "TERM": "xterm-256color", "COLUMNS": columns}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, end], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = _read(ours, until=(b"412/900", b"a note") if end == "kill" else ())
    if end == "kill":
        process.send_signal(signal.SIGKILL)
    process.wait(timeout=HANG_S)
    os.close(ours)
    assert b"step 412/900" in output
    assert b"a note" in output
    assert b"\x1b[?" not in output
    if end == "raise":
        assert b"loss 2.250" in output
        assert b"RuntimeError: broken" in output
        assert output.endswith(b"\n")


def _read(descriptor: int, *, until: tuple[bytes, ...]) -> bytes:
    """What is written until all of `until` are in it, in any order; without any, until the other side is closed."""
    output, deadline_s = b"", time.monotonic() + HANG_S
    while time.monotonic() < deadline_s and not (until and all(text in output for text in until)):
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                output += os.read(descriptor, 65536)
            except OSError:  # the other side is closed
                break
    return output


def test_the_last_step_has_one_line_with_its_own_evaluation() -> None:
    """Although its line is due before it is evaluated, and the held-out loss of an earlier step is there."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, every_s=5.0, clock=clock)
    display.start(RunStart(name="run", total_steps=2))
    display.record(1, VALUES, time_s=0.0)
    display.record(1, {"loss/eval": 3.5}, time_s=0.0)
    clock.now_s = 6.0
    display.record(2, VALUES, time_s=0.0)
    display.activity(EVALUATING)
    display.activity("")
    display.record(2, {"loss/eval": 2.5}, time_s=0.0)
    display.activity("waiting until the checkpoint is written")
    display.finish(FINISHED)
    last = [line for line in stream.getvalue().splitlines() if line.startswith("step 2/2")]
    assert len(last) == 1
    assert "held out 2.500" in last[0]
