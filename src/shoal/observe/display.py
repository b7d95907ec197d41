"""Who is told how the run goes: a terminal gets a live line, a pipe gets a line now and then, other ranks nothing."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from shoal.observe.progress import Progress

PLAIN_EVERY_S = 5.0


class Display(Protocol):
    """Called by the training loop; `step` must cost it almost nothing."""

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """The run begins; `first_step` is the number of the first step it will do (1 in a fresh run)."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step, or an evaluation after it, is done; `values` must not change afterwards."""
        ...

    def note(self, text: str) -> None:
        """Says something once."""
        ...

    def warn(self, text: str) -> None:
        """Says something that somebody should look at."""
        ...

    def finish(self) -> None:
        """The run is over, however it ended; a second call does nothing."""
        ...


class SilentDisplay:
    """For the ranks that are not rank 0."""

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """Shows nothing."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""

    def warn(self, text: str) -> None:
        """Shows nothing: the rank's log has it."""

    def finish(self) -> None:
        """Shows nothing."""


class PlainDisplay:
    """Whole lines for pipes and CI: the first step, each evaluation, one every few seconds, and the last step."""

    def __init__(
        self, stream: TextIO, *, every_s: float = PLAIN_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._progress: Progress | None = None
        self._printed_step = -1
        self._printed_s = -float("inf")

    def start(self, title: str, total_steps: int, *, first_step: int) -> None:
        """Prints the title and where the run starts."""
        self._progress = Progress(title, total_steps, first_step=first_step, clock=self._clock)
        resumed = "" if first_step <= 1 else f", resumed after step {first_step - 1}"
        self._say(f"{title}: {total_steps} steps{resumed}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the step if it is due."""
        if self._progress is None:
            return
        self._progress.update(step, values)
        if self._clock() - self._printed_s >= self._every_s or "loss/eval" in values:
            self._print_step()

    def note(self, text: str) -> None:
        """Prints a line."""
        self._say(text)

    def warn(self, text: str) -> None:
        """Prints a line that says it is a warning."""
        self._say(f"warning: {text}")

    def finish(self) -> None:
        """Prints the last step, unless that was done."""
        if self._progress is not None and self._progress.step != self._printed_step and self._progress.values:
            self._print_step()
        self._progress = None

    def _print_step(self) -> None:
        assert self._progress is not None
        self._printed_step, self._printed_s = self._progress.step, self._clock()
        self._say(self._progress.line())

    def _say(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a pipe that was closed, a full disk: no reason to end a run
            self._stream = io.StringIO()


def display_for(stream: TextIO, rank: int, *, plain: bool | None = None) -> Display:
    """Rank 0's display on `stream`; live on a terminal, plain elsewhere; `plain` decides instead where it is given."""
    if rank != 0:
        return SilentDisplay()
    if plain is None:
        plain = not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb"
    if plain:
        return PlainDisplay(stream)
    from shoal.observe.live import LiveDisplay  # 60 ms of rich that a pipe need not wait for

    return LiveDisplay(stream)
