"""Ranks of a benchmark say how far it has come, and the user's process shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.bench.report import PIPE, shown, tell, told


def as_rank(rank: int, pipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of a benchmark."""
    environ = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, PIPE: pipe}
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))


def test_each_part_is_shown_once_while_its_counts_move_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which rank 0 tells of them; the other ranks are not heard."""
    with shown("2 of 7: rate, lab slow", tmp_path) as environ:
        as_rank(0, environ[PIPE], monkeypatch)
        assert list(told("abc", "all_reduce", total=3)) == ["a", "b", "c"]
        tell("barrier", done=1, total=2)
        as_rank(1, environ[PIPE], monkeypatch)
        tell("of rank 1")
    assert capsys.readouterr().err.splitlines() == [
        "2 of 7: rate, lab slow",
        "2 of 7: rate, lab slow: all_reduce",
        "2 of 7: rate, lab slow: barrier",
    ]


def test_a_rank_never_waits_for_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody reads, the pipe fills up and the rest is dropped; without a pipe nothing is told."""
    path = tmp_path / "full"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    as_rank(0, str(path), monkeypatch)
    for _ in range(5000):
        tell("a part of the work", done=1, total=2)
    read = os.read(reader, 1 << 20)
    assert 0 < read.count(b"\n") < 5000
    os.close(reader)
    tell("nobody has it open")
    monkeypatch.delenv(PIPE)
    tell("no benchmark")


def test_what_fails_ends_the_bar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), shown("steps", tmp_path):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "steps\n"
