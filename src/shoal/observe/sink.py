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
from types import TracebackType

from shoal.observe.ending import Ending, ending_of


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
