"""One call of the training loop reaches every sink, and every sink is finished."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal.errors import Diverged, Stopped
from shoal.observe.config import ObserveConfig
from shoal.observe.events import read_events
from shoal.observe.facts import read_facts
from shoal.observe.sink import Ending, RunStart, Sink, Sinks, ending_in
from shoal.observe.sinks import log_path, open_sinks

RUN = RunStart(name="own", total_steps=3)


class Recorder(Sink):
    """Writes down what it hears."""

    def __init__(self, heard: list[object], name: str = "", *, broken: bool = False) -> None:
        self.heard, self.name, self.broken = heard, name, broken

    def start(self, run: RunStart) -> None:
        self.heard.append((self.name, run))

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        self.heard.append((self.name, step, values, time_s))

    def finish(self, ending: Ending) -> None:
        self.heard.append((self.name, ending))
        if self.broken:
            raise OSError(f"{self.name} is broken")


def test_a_sink_that_hears_nothing_is_a_sink() -> None:
    """The base class does nothing on every call, and a sink overrides what it wants to hear."""
    heard: list[object] = []
    sinks = Sinks(Sink(), Recorder(heard))
    sinks.start(RUN)
    sinks.record(1, {"lr": 0.1}, time_s=2.0)
    sinks.note("a")
    sinks.warn("b")
    sinks.activity("c")
    sinks.finish(Ending("finished"))
    assert heard == [("", RUN), ("", 1, {"lr": 0.1}, 2.0), ("", Ending("finished"))]


def test_every_sink_is_finished_once_and_the_last_first() -> None:
    """Where one raises, the others are finished all the same, and its error is raised."""
    heard: list[object] = []
    sinks = Sinks(*(Recorder(heard, name, broken=name == "b") for name in "abc"))
    with pytest.raises(OSError, match="b is broken"):
        sinks.finish(Ending("finished"))
    sinks.finish(Ending("finished"))
    assert [name for name, _ in heard] == ["c", "b", "a"]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, Ending("finished")),
        (Stopped("by a signal"), Ending("stopped", "by a signal", None, 75)),
        (Diverged("no use"), Ending("diverged", "no use", None, 4)),
        (ArithmeticError("a mistake"), Ending("failed", "ArithmeticError: a mistake", None, 1)),
        (KeyboardInterrupt(), Ending("failed", "KeyboardInterrupt", None, 1)),
    ],
)
def test_an_exception_is_an_ending(error: BaseException | None, ending: Ending) -> None:
    """As a context, `Sinks` tell how the run ended; the exception goes on, and a broken sink does not hide it."""
    heard: list[object] = []
    if error is None:
        with Sinks(Recorder(heard)):
            pass
    else:
        with pytest.raises(type(error)) as raised:
            _fail_within(Sinks(Recorder(heard, broken=True)), error)
        assert raised.value is error
        assert getattr(error, "__notes__", None) == ["and at the end of the run:  is broken"]
    assert heard[-1] == ("", ending)


def _fail_within(sinks: Sinks, error: BaseException) -> None:
    with sinks:
        sinks.start(RUN)
        raise error


def test_rank_0_writes_everything_and_the_others_their_events_and_logs(tmp_path: Path) -> None:
    """A run of two ranks in one directory: events and logs of both; display, ending and report of rank 0."""
    for rank in (1, 0):
        stream = io.StringIO()
        with open_sinks(ObserveConfig(), tmp_path, rank=rank, stream=stream) as sinks:
            sinks.start(RUN)
            for step in (1, 2, 3):
                sinks.record(step, {"loss/train": 1.0 / step, "time/step": 0.1}, time_s=float(step))
            sinks.warn("look at this")
        assert ("own: 3 steps" in stream.getvalue()) == (rank == 0)
        assert [event.step for event in read_events(tmp_path, rank)] == [1, 2, 3]
        assert "look at this" in log_path(tmp_path, rank).read_text()
        assert (tmp_path / "report.html").exists() == (rank == 0)
    assert stream.getvalue().splitlines()[-1].startswith("finished: 3 steps")
    assert ending_in(read_facts(tmp_path)) == Ending("finished")
    assert "report: " in log_path(tmp_path, 0).read_text()


def test_a_resumed_run_voids_the_steps_it_computes_again(tmp_path: Path) -> None:
    """The line without values that says so is written at the start, before any step."""
    sinks = open_sinks(ObserveConfig(report=False), tmp_path, rank=1, stream=io.StringIO())
    sinks.start(RunStart(name="own", total_steps=9, first_step=6, generation=2))
    assert [(event.step, event.generation, event.values) for event in read_events(tmp_path, 1)] == [(5, 2, {})]


def test_who_reports_a_failure_is_chosen(tmp_path: Path) -> None:
    """With a launcher that knows the cause, rank 0 leaves a failed run to it; a stopped or diverged run it reports."""
    for failures, error, expected in ((False, ValueError("x"), None), (False, Diverged("y"), "diverged"),
                                      (True, ValueError("x"), "failed")):  # fmt: skip
        directory = tmp_path / f"{failures}-{expected}"
        sinks = open_sinks(ObserveConfig(), directory, rank=0, stream=io.StringIO(), reports_failure=failures)
        with pytest.raises(type(error)):
            _fail_within(sinks, error)
        ending = ending_in(read_facts(directory))
        assert (ending.state if ending else None) == expected
        assert (directory / "report.html").exists() == (expected is not None)


def test_an_old_failure_counts_no_more_after_a_start() -> None:
    """A start sets the state to ""; facts of the wrong type are no ending and raise nothing."""
    failure = {"cause": "x", "rank": 1, "exit_code": 1}
    assert ending_in({"state": "failed", "failure": failure}) == Ending("failed", "x", 1, 1)
    assert ending_in({"state": "", "failure": failure}) is None
    for facts in ({}, {"state": 3}, {"state": ["failed"]}, {"state": "unheard of"}):
        assert ending_in(facts) is None
    assert ending_in({"state": "failed", "failure": {"cause": 1, "rank": True, "exit_code": "1"}}) == Ending("failed")
