"""Who hears how a run goes: sinks. The training loop talks to one `Sinks`, which passes everything on.

A sink is called in this order, on the thread that trains:

    start(run)                        the run begins
    generation(run)                   the membership has changed, and the run goes on (elastic runs alone)
    record(step, values, time_s=...)  a step, or an evaluation after it, is done
    finish(ending)                    the run is over, however it ended

and at any time, also before the start: `note` and `warn` with a sentence, `activity` with what the run does when it
does not train. The base class does nothing, so a sink overrides what it wants to hear and no more. A new kind of sink
is one file and one line of `shoal.observe.sinks.open_sinks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from shoal.errors import Diverged, ShoalError, Stopped
from shoal.observe.facts import write_facts

# How a run ended, as `facts.json` keeps it for the report.
#
#     {"state": "failed", "failure": {"cause": "ArithmeticError: a mistake", "rank": 1, "exit_code": 1}}
#
# A run that was killed writes nothing: the report tells it from one that still runs by the lock of the run directory.
# Every start sets "state" to "", and a failure counts only beside a state, so that a restart makes an old one void.


State = Literal["finished", "stopped", "diverged", "failed"]
STATES: tuple[State, ...] = ("finished", "stopped", "diverged", "failed")
MAX_CAUSE_CHARACTERS = 4000


@dataclass(frozen=True)
class Ending:
    """How a run ended; `cause`, `rank` and `exit_code` say why, where it did not reach its last step."""

    state: State
    cause: str = ""
    rank: int | None = None
    exit_code: int = 0


def ending_of(error: BaseException | None, *, rank: int | None = None) -> Ending:
    """The ending that an exception stands for, and "finished" for None. `rank` is where it was raised."""
    if error is None:
        return Ending("finished")
    state: State = "stopped" if isinstance(error, Stopped) else "diverged" if isinstance(error, Diverged) else "failed"
    on_purpose = isinstance(error, ShoalError)
    cause = str(error) if on_purpose else f"{type(error).__name__}: {error}".removesuffix(": ")
    return Ending(state, cause, rank, error.exit_code if on_purpose else 1)


def write_ending(run_directory: Path, ending: Ending) -> None:
    """Writes the ending into the facts of the run. Raises `UsageError` where those are damaged, or `OSError`."""
    failure = {"cause": ending.cause[:MAX_CAUSE_CHARACTERS], "rank": ending.rank, "exit_code": ending.exit_code}
    write_facts(run_directory, {"state": ending.state, "failure": None if ending.state == "finished" else failure})


def ending_in(facts: Mapping[str, Any]) -> Ending | None:
    """The ending that facts tell of, or None. What is of the wrong type counts as missing."""
    state: State | None = next((known for known in STATES if facts.get("state") == known), None)
    if state is None:
        return None
    failure = facts.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    cause, rank, exit_code = (failure.get(key) for key in ("cause", "rank", "exit_code"))
    return Ending(
        state,
        cause[:MAX_CAUSE_CHARACTERS] if isinstance(cause, str) else "",
        rank if isinstance(rank, int) and not isinstance(rank, bool) else None,
        exit_code if isinstance(exit_code, int) and not isinstance(exit_code, bool) else 0,
    )


EVALUATING = "evaluating"
"""The activity whose figures are recorded behind it."""
OPEN_END = 10**9
"""The `run.steps` of a run whose loop alone knows which step is its last."""


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What a sink is told at the start. `first_step` is the number of the first step to be done (1 in a fresh run).

    `epoch_samples` are the samples of one epoch, None where the data has no end. `membership`: which replicas of an
    elastic run train, in a sentence.
    """

    name: str
    total_steps: int
    first_step: int = 1
    generation: int = 0
    epoch_samples: int | None = None
    membership: str = ""

    @property
    def open_end(self) -> bool:
        """Whether nobody knows how many steps it will have."""
        return self.total_steps >= OPEN_END

    @property
    def resumed_from(self) -> int | None:
        """The step of the checkpoint that the run goes on from; None for a fresh run."""
        return self.first_step - 1 if self.first_step > 1 else None


class Sink:
    """Hears of a run and does nothing. Its methods must cost the training loop microseconds and not end the run."""

    def start(self, run: RunStart) -> None:
        """The run begins."""

    def generation(self, run: RunStart) -> None:
        """Other replicas train from `run.first_step` on; this process and its sinks go on."""

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """The measurements of step `step` (1 is the first) at the Unix time `time_s`; nobody changes `values` later."""

    def note(self, text: str) -> None:
        """Says a sentence."""

    def warn(self, text: str) -> None:
        """Says a sentence that somebody should act on."""

    def activity(self, text: str) -> None:
        """Says what the run does now, such as "evaluating"; "" when it trains again."""

    def finish(self, ending: Ending) -> None:
        """The run is over. Nothing but sentences follows; a second call does nothing."""


class Sinks(Sink):
    """Passes every call on to each of its sinks, in the order in which they were added; `finish` goes the other way.

    As a context manager it finishes them: with `Ending("finished")`, or with the ending that an exception stands for.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self._finished = False

    def add(self, sink: Sink) -> None:
        """One more sink, which hears everything from now on."""
        self._sinks.append(sink)

    def start(self, run: RunStart) -> None:
        for sink in self._sinks:
            sink.start(run)

    def generation(self, run: RunStart) -> None:
        for sink in self._sinks:
            sink.generation(run)

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        for sink in self._sinks:
            sink.record(step, values, time_s=time_s)

    def note(self, text: str) -> None:
        for sink in self._sinks:
            sink.note(text)

    def warn(self, text: str) -> None:
        for sink in self._sinks:
            sink.warn(text)

    def activity(self, text: str) -> None:
        for sink in self._sinks:
            sink.activity(text)

    def finish(self, ending: Ending) -> None:
        """Finishes every sink, then raises the first error that one of them raised. A second call does nothing."""
        if self._finished:
            return
        self._finished = True
        errors: list[Exception] = []
        for sink in reversed(self._sinks):
            try:
                sink.finish(ending)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish(ending_of(error))
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"and at the end of the run: {fault}")
