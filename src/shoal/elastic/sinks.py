"""The sinks of one rank of an elastic run, whose number changes, and the record of who trains since when, and of what a
change of the membership cost:

    detecting     from the end of the last step that counts until this rank knew of the loss; none where nobody is lost
    restarting    from there until it could take the next step
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from shoal.assembly.job import run_start, sinks_of
from shoal.assembly.run import Run
from shoal.assembly.run_record import run_facts, write_run_file
from shoal.observe.ending import ending_of
from shoal.observe.facts import read_facts, write_facts
from shoal.observe.goodput import DETECTING, RESTARTING
from shoal.observe.provenance import provenance
from shoal.observe.sink import Sinks
from shoal.resilience.detection import ranks_of
from shoal.resilience.events import View
from shoal.runfile.run_file import RunFile

MOST_LISTED = 200
"""Changes of the membership that the facts of a run keep: the newest."""


class MembershipSinks:
    """The sinks of one rank. Its number changes from one generation to the next; rank 0 writes to `terminal_fd`."""

    def __init__(self, run_file: RunFile, directory: Path, terminal_fd: int, *, ranks: int = 1) -> None:
        """`ranks` are those of one replica."""
        self._run_file, self._directory, self._terminal_fd, self._ranks = run_file, directory, terminal_fd, ranks
        self._sinks: Sinks | None = None
        self._rank = -1
        self._terminal: TextIO | None = None
        self._members: tuple[str, ...] = ()
        self._started = False
        self._stepped_s: float | None = None
        self._lost_s: float | None = None
        self._made_of = provenance(os.environ)
        """Found here, in 0.1 s, because every rank may be rank 0 one day, and others then wait for it."""

    def stepped(self) -> None:
        """A step that counts was taken."""
        self._stepped_s, self._lost_s = time.monotonic(), None

    def lost(self) -> None:
        """The generation has failed, as this rank now knows."""
        if self._lost_s is None:
            self._lost_s = time.monotonic()

    def of(self, run: Run) -> Sinks:
        """The sinks of this rank: those that it has, if its rank is the same."""
        place = run.process.place
        if self._sinks is None or self._rank != place.rank:
            self.finish(None)
            self._sinks, self._rank = sinks_of(self._run_file, place, stream=self._stream(place.rank)), place.rank
            self._started = False
        return self._sinks

    def begin(self, run: Run, sinks: Sinks, view: View) -> None:
        """A generation begins, and all its ranks have the state."""
        step = run.state.progress.step
        sentence = membership_sentence(self._members, view.members, most=self._most, step=step, ranks=self._ranks)
        start = replace(run_start(run), membership=sentence)
        if self._rank == 0:
            self._write(run, sinks, {"step": step, "replicas": len(view.members), "change": sentence})
        if self._started:
            sinks.generation(start)
        else:
            sinks.start(start if self._members else replace(start, membership=""))
            self._started = True
        values = {"membership/replicas": len(view.members), "membership/generation": view.generation}
        sinks.record(step, values | self._cost(time.monotonic()), time_s=time.time())
        self._members = view.members

    def _cost(self, now_s: float) -> dict[str, float]:
        """Seconds since the last step; nothing where this replica has taken none."""
        if self._stepped_s is None:
            return {}
        known_s = self._stepped_s if self._lost_s is None else self._lost_s
        cost = {DETECTING: known_s - self._stepped_s, RESTARTING: now_s - known_s}
        self._stepped_s, self._lost_s = now_s, None  # a generation without a step adds to it
        return cost

    def note(self, text: str) -> None:
        """A sentence for the log of this replica."""
        if self._sinks is not None:
            self._sinks.note(text)

    def finish(self, error: BaseException | None) -> None:
        """The run is over, or this replica's rank is another from now on: no rank but 0 says how the run ended."""
        if self._sinks is not None:
            self._sinks.finish(ending_of(error))
            self._sinks = None

    @property
    def _most(self) -> int:
        return self._run_file.elastic.max if self._run_file.elastic is not None else 1

    def _stream(self, rank: int) -> TextIO | None:
        if rank != 0:
            return None
        if self._terminal is None:
            self._terminal = os.fdopen(os.dup(self._terminal_fd), "w", encoding="utf-8")
        return self._terminal

    def _write(self, run: Run, sinks: Sinks, change: dict[str, Any]) -> None:
        if not self._started:
            write_run_file(run, self._directory, sinks)
        listed = read_facts(self._directory).get("membership", [])
        change = {"generation": run.mesh.generation, **change}
        write_facts(
            self._directory, run_facts(run, made_of=self._made_of) | {"membership": [*listed, change][-MOST_LISTED:]}
        )


def membership_sentence(before: tuple[str, ...], now: tuple[str, ...], *, most: int, step: int, ranks: int = 1) -> str:
    """Who trains from the step after `step` on: "3 of 4 replicas; rank 2 lost after step 120", which is also
    said of one that has left. At the start "" where all are there, else "3 of 4 replicas".

    `ranks` are those of one replica.
    """
    if not before:
        return f"{len(now)} of {most} replicas" if len(now) < most else ""
    gone = [ranks_of(member, ranks) for member, name in enumerate(before) if name not in now]
    new = [ranks_of(member, ranks) for member, name in enumerate(now) if name not in before]
    parts = [f"{len(now)} of {most} replicas"]
    if gone:
        parts.append(f"{', '.join(gone)} lost after step {step}")
    if new:
        parts.append(f"{', '.join(new)} joined after step {step}")
    return "; ".join(parts)
