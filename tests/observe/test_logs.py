"""Each rank has its log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from shoal.observe.sink import Ending, RunStart
from shoal.observe.sinks import LogSink, close_log, log_path, open_log


def test_a_line_has_its_time_rank_and_level(tmp_path: Path) -> None:
    """A line of the log says when, who and how serious, and the file is appended to over two attempts."""
    for text in ("first attempt", "second attempt"):
        log = open_log(tmp_path, rank=3)
        log.info(text)
        close_log(log)
    lines = log_path(tmp_path, 3).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  rank 3  INFO +second attempt", lines[1])


def test_the_sink_writes_what_is_said_and_how_it_ended(tmp_path: Path) -> None:
    """Start, notes, warnings and the ending, with control characters escaped; nothing after the end."""
    sink = LogSink(tmp_path, rank=0)
    sink.start(RunStart(name="own", total_steps=9, first_step=4))
    sink.note("a note\x1b[2J")
    sink.warn("rank 2 is late")
    sink.finish(Ending("failed", "ValueError: no"))
    sink.note("too late")
    lines = [line.split("  ", 2)[2] for line in log_path(tmp_path, 0).read_text(encoding="utf-8").splitlines()]
    assert lines == [
        "INFO     own: steps 4 to 9",
        "INFO     a note\\x1b[2J",
        "WARNING  rank 2 is late",
        "ERROR    failed: ValueError: no",
    ]


def test_two_runs_of_one_process_do_not_mix(tmp_path: Path) -> None:
    """A logger writes into its own run's file, also when an earlier one was not closed."""
    one = open_log(tmp_path / "one", rank=0)
    two = open_log(tmp_path / "two", rank=0)
    two.info("hello")
    close_log(one)
    close_log(two)
    assert log_path(tmp_path / "one", 0).read_text() == ""
    assert "hello" in log_path(tmp_path / "two", 0).read_text()


def test_a_log_that_cannot_be_opened_is_an_environment_fault(tmp_path: Path) -> None:
    """The sentence names the file and the repair."""
    (tmp_path / "logs").write_text("")
    with pytest.raises(EnvironmentFault, match=r"rank-00000\.log.*run\.directory"):
        open_log(tmp_path, rank=0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a device that is full")
def test_a_full_disk_prints_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither for a line nor at the end: what is said about the run is on the terminal all the same."""
    log_path(tmp_path, 0).parent.mkdir()
    log_path(tmp_path, 0).symlink_to("/dev/full")
    sink = LogSink(tmp_path, rank=0)
    sink.note("a note")
    sink.finish(Ending("finished"))
    assert capfd.readouterr().err == ""
