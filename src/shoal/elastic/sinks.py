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

import torch

from shoal.assembly.job import run_start, sinks_of
from shoal.assembly.run import Run
from shoal.assembly.run_record import run_facts, write_run_file
from shoal.coordinator.client import Client
from shoal.data.cursor import Interval
from shoal.data.order import share
from shoal.elastic.state_copy import held_state
from shoal.engine.tally import StepResult
from shoal.gradients.residuals import is_own
from shoal.maths.fingerprint import fingerprint
from shoal.observe.facts import read_facts, write_facts
from shoal.observe.goodput import DETECTING, RESTARTING
from shoal.observe.provenance import provenance
from shoal.observe.sink import Sinks, ending_of
from shoal.resilience.detection import ranks_of
from shoal.resilience.events import View
from shoal.runfile.run_file import RunFile, statistics_group
from shoal.topology.layout import INSIDE_REPLICA

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


# What a rank reports of its steps: those that count, in order, and now and then a fingerprint of its parameters.


HALF_BITS = 31


class StepReports:
    """The reports of one rank in one generation. Fingerprints are taken `every` so many steps, 0: never."""

    def __init__(self, client: Client, run: Run, *, every: int) -> None:
        self._client, self._run, self._every = client, run, every
        self._taken: list[tuple[int, float]] = []

    def taken(self, result: StepResult) -> None:
        """A step was taken; it counts when `send` is called."""
        samples = samples_here(self._run)
        sample_s = result.times.forward_backward_s / samples if samples else 0.0
        self._taken.append((self._run.state.progress.cursor.next_position, sample_s))

    def send(self) -> None:
        """All steps since the last call count. Does not wait for the coordinator. Raises `FencedOut`."""
        step, taken, self._taken = self._run.state.progress.step, self._taken, []
        due = self._every > 0 and step // self._every > (step - len(taken)) // self._every
        last = len(taken) - 1
        for number, (stop, sample_s) in enumerate(taken):
            value = replica_fingerprint(self._run) if due and number == last else 0
            self._client.applied(stop=stop, fingerprint=value, sample_s=sample_s)


def samples_here(run: Run) -> int:
    """How many samples of a step this rank's replica computes; a server computes none."""
    run_file, (number, replicas) = run.run_file, run.mesh.batch_share
    working = replicas - run_file.sync.serving_only
    whole, group = Interval(0, run_file.batch.global_samples), statistics_group(run_file.model)
    return len(share(whole, replicas=working, replica=number, group=group)) if number < working else 0


def replica_fingerprint(run: Run) -> int:
    """That of what all replicas have equal: the state without what a rank keeps for itself, or where replicas have
    optimizers of their own the model.

    The ranks of a replica add theirs: all of them call it.
    """
    equal = run.generation.sync.keeps_replicas_equal
    held = held_state(run.state).pieces("" if equal else "model/")
    pieces = {name: piece for name, piece in held.items() if not is_own(name)}
    if run.generation.agreement.served is not None:  # servers hold different rows of a table
        away = tuple(
            f"model/{name}@" for name, role in run.generation.parts.split.roles.items() if role.kind == "table"
        )
        pieces = {name: piece for name, piece in pieces.items() if not name.startswith(away)}
    own = fingerprint(pieces)
    if run.mesh.layout.replica_size == 1:
        return own
    halves = torch.tensor([own >> HALF_BITS, own % (1 << HALF_BITS)], dtype=torch.int64, device=run.device)
    run.mesh.axis(*INSIDE_REPLICA).all_reduce(halves).wait()
    high, low = halves.tolist()
    return ((high << HALF_BITS) + low) % (2**63 - 1) or 1
