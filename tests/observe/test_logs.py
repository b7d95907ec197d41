"""Each rank has its file; the terminal hears warnings only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from shoal.observe.logs import close_log, log_path, open_log


def test_a_line_has_its_time_rank_and_level(tmp_path: Path) -> None:
    """A line of the log says when, who and how serious, and the file is appended to over two lives."""
    for text in ("first life", "second life"):
        log = open_log(tmp_path, rank=3, to_terminal=False)
        log.info(text)
        close_log(log)
    lines = log_path(tmp_path, 3).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  rank 3  INFO +second life", lines[1])


def test_only_warnings_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The display hears warnings, not information, and nothing goes around it; the file has both."""
    said: list[str] = []
    log = open_log(tmp_path, rank=0, to_terminal=True, warn=said.append)
    log.info("step %d", 1)
    log.warning("rank %d is late", 2)
    close_log(log)
    assert said == ["rank 2 is late"]
    assert capsys.readouterr() == ("", "")
    assert "step 1" in log_path(tmp_path, 0).read_text(encoding="utf-8")


def test_without_a_display_warnings_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays clean for what the verb prints; other ranks say nothing at all."""
    for rank, to_terminal in ((0, True), (1, False)):
        log = open_log(tmp_path, rank=rank, to_terminal=to_terminal)
        log.warning("from %d", rank)
        close_log(log)
    assert capsys.readouterr() == ("", "warning: from 0\n")


def test_two_runs_of_one_process_do_not_mix(tmp_path: Path) -> None:
    """A logger writes into its own run's file, also when an earlier one was not closed."""
    one = open_log(tmp_path / "one", rank=0, to_terminal=False)
    two = open_log(tmp_path / "two", rank=0, to_terminal=False)
    two.info("hello")
    close_log(one)
    close_log(two)
    assert log_path(tmp_path / "one", 0).read_text() == ""
    assert "hello" in log_path(tmp_path / "two", 0).read_text()


def test_a_log_that_cannot_be_opened_is_an_environment_fault(tmp_path: Path) -> None:
    """The sentence names the file and the repair."""
    (tmp_path / "logs").write_text("")
    with pytest.raises(EnvironmentFault, match=r"rank-00000\.log.*run\.directory"):
        open_log(tmp_path, rank=0, to_terminal=False)
