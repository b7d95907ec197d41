"""Verbs that take long say what they do, and Ctrl-C ends them with a sentence."""

from __future__ import annotations

import io
import sys
import threading
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.arguments import Verbs
from shoal.observe import busy as busy_module
from shoal.observe.busy import busy, importing_torch
from tests.waiting import HANG_S, NEVER_S


class Heard(io.StringIO):
    """A stream that says when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


class Watched(Heard):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_long_work_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, while it goes on."""
    monkeypatch.setattr(sys, "stderr", heard := Heard())
    with busy("reading the model", after_s=0.0):
        assert heard.written.wait(HANG_S)
    assert heard.getvalue() == "reading the model\n"


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is shown once the work is over, and no thread is left."""
    monkeypatch.setattr(sys, "stderr", heard := Heard())
    with busy("reading the model", after_s=NEVER_S):
        thread = next(thread for thread in threading.enumerate() if thread.name == "shoal-busy")
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert heard.getvalue() == ""


def test_imports_are_said_on_a_terminal_where_they_are_still_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that has made them, and a pipe, hear nothing."""
    monkeypatch.setattr(busy_module, "SILENCE_S", 0.0)
    for modules, stream, said in (({}, Watched(), True), ({"torch": None}, Watched(), False), ({}, Heard(), False)):
        monkeypatch.setattr(busy_module, "sys", SimpleNamespace(modules=modules, stderr=stream))
        with importing_torch():
            assert not said or stream.written.wait(HANG_S)
        assert ("importing PyTorch" in stream.getvalue()) == said


def test_an_interrupted_verb_ends_with_a_sentence_and_the_signal_s_code() -> None:
    """128 + SIGINT, and no traceback."""
    app = typer.Typer(cls=Verbs, name="shoal")

    @app.command()
    def works() -> None:
        raise KeyboardInterrupt

    @app.command()
    def rests() -> None: ...

    result = CliRunner().invoke(app, ["works"], prog_name="shoal")
    assert result.exit_code == 130
    assert result.stderr == "shoal works: interrupted before its end; the same command starts it again\n"
