"""A watch on every rank: when one waits too long in a collective, all say where they are, and a sentence names why.

Each rank has a thread that looks once a second at what the thread that trains is doing. Where that has been in one
collective for `after_s`, the rank asks on the run's board; every rank's watch answers with its stack and its newest
call in each group, and those that wait work out the verdict (`shoal.resilience.hang_verdict`). A rank that is stopped,
dead or cut off does not answer, which names it. The verdict goes to the log and to `hang.json` in the run directory,
so that the launcher can say it when the collective's timeout ends the run.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec

from shoal.assembly.run import Run
from shoal.comm.board import Board
from shoal.comm.diagnosis import LIBRARY
from shoal.comm.mesh import Mesh
from shoal.comm.seam import Seam
from shoal.comm.seam_work import SeamWork
from shoal.errors import CollectiveError
from shoal.resilience.detection import Activity
from shoal.resilience.hang_verdict import CodePlace, HangVerdict, LastCall, RankReport, hang_verdict, write_verdict
from shoal.state import wait_for

LOOK_S = 1.0
ANSWER_S = 3.0
"""What ranks have to answer in; one that computes in C without the interpreter's lock for longer counts as silent."""
DEEPEST = 60
END_S = 5.0
"""How long the end of a run waits for the thread to leave the store; a process must not end while it is there."""
MOST = 5
"""Verdicts of one start: a rank that is merely slow in every step is for `shoal profile`."""


class Waiting(NamedTuple):
    """In which call of which group the thread that trains waits; `DEVICE`: for a GPU, which may be in any of them."""

    label: str
    number: int


DEVICE = "(the device)"


class HangWatch:
    """Watches the thread that makes it, until its block ends. `say` gets the sentence.

    `directory`: of the run. `board`: of its own, as its thread waits there.
    """

    def __init__(
        self, mesh: Mesh, board: Board, directory: Path, *, after_s: float, say: Callable[[str], None]
    ) -> None:
        self._mesh, self._board, self._directory, self._say = mesh, board, directory, say
        self._after_s, self._watched = after_s, threading.get_ident()
        self._heard: set[int] = set()  # ranks that have reported since this one is in its present call
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> HangWatch:
        if self._after_s and self._mesh.layout.world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def _watch(self) -> None:
        asked, since_s, before = 0, time.monotonic(), None
        try:
            while asked < MOST and not self._ended.wait(LOOK_S):
                here = self._waiting()
                if here is None or here != before:
                    before, since_s = here, time.monotonic()
                    self._heard.clear()
                late = here is not None and time.monotonic() - since_s > self._after_s
                if late:
                    self._board.publish(f"asked/{asked}", b"")
                if late or self._board.published(f"asked/{asked}"):
                    self._answer(asked, late=late or here is not None)
                    asked, since_s = asked + 1, time.monotonic()
        except CollectiveError:
            return  # the store is gone, and so is the run

    def _answer(self, number: int, *, late: bool) -> None:
        """Tells where this rank is; one that waits tells what follows from all answers."""
        rank, size = self._mesh.rank, self._mesh.layout.world_size
        own = self.report()
        self._board.publish(f"report/{number}/{rank}", msgspec.json.encode(own))
        if not late and not waits(own):
            return
        keys = {f"report/{number}/{other}": other for other in range(size)}
        found = self._board.collect_some(list(keys), ANSWER_S)
        reports = {keys[key]: msgspec.json.decode(text, type=RankReport) for key, text in found.items()}
        verdict = hang_verdict(groups_of(reports), reports, library=LIBRARY)
        silent = {*verdict.ranks} - reports.keys()
        if silent and silent <= self._heard:
            return  # they have said where they are, and have given up since: the verdict of then stands
        self._heard |= reports.keys()
        self._say(verdict.sentence)
        if rank == min(writers(reports, verdict), default=rank):
            try:
                write_verdict(self._directory, verdict)
            except OSError as error:
                self._say(f"the reason could not be written for the launcher: {error}")

    def report(self) -> RankReport:
        """Where this rank is now."""
        here, calls, groups = self._waiting(), {}, {}
        for label, (ranks, group) in self._mesh.opened().items():
            groups[label] = ranks
            if group.log.count:
                call = group.log.last()
                inside = here is not None and here.label in (label, DEVICE)
                place = CodePlace(call.file, call.line)
                calls[label] = LastCall(group.log.count, call.signature, place, ended=not inside, pending=group.pending)
        places = [CodePlace(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in self._frames()]
        return RankReport(self._mesh.rank, socket.gethostname(), calls, tuple(reversed(places)), groups)

    def activity(self) -> Activity:
        """How many collectives this rank has called, and whether it waits in one. From any thread."""
        calls = sum(group.log.count for _, group in self._mesh.opened().values())
        return Activity(calls, "computes" if self._waiting() is None else "waits")

    def _waiting(self) -> Waiting | None:
        """The collective that the watched thread is in; None where it is in none.

        Collectives of GPUs are in the device's queue: a thread that waits for the device may wait for other ranks. The
        newest calls tell whom for, as each rank has launched what comes before them.
        """
        for frame in self._frames():
            if frame.f_code is wait_for.__code__:
                return Waiting(DEVICE, sum(group.log.count for _, group in self._mesh.opened().values()))
            owner = frame.f_locals.get("self") if frame.f_code.co_filename.endswith(_SEAMS) else None
            if isinstance(owner, SeamWork | Seam):
                label = getattr(owner, "label", None)  # none yet, while it is being made
                if label in (opened := self._mesh.opened()):
                    return Waiting(label, opened[label][1].log.count)
        return None

    def _frames(self) -> Iterator[FrameType]:
        """Those of the watched thread, the innermost first."""
        frame = sys._current_frames().get(self._watched)
        for _ in range(DEEPEST):
            if frame is None:
                return
            yield frame
            frame = frame.f_back


_SEAMS = ("seam.py", "seam_work.py")


def watch_hangs(run: Run, directory: Path, *, say: Callable[[str], None]) -> HangWatch:
    """The watch on this rank of `run`, as the run file asks for it; its verdicts go to `directory`, the run's."""
    wire = run.run_file.wire
    board = Board(run.process.store, timeout_s=wire.timeout_s).clone().under(f"hang/{run.mesh.generation}")
    return HangWatch(run.mesh, board, directory, after_s=wire.report_hang_s, say=say)


def groups_of(reports: Mapping[int, RankReport]) -> dict[str, tuple[int, ...]]:
    """The members of every group that is open on a rank that has reported."""
    return {label: ranks for report in reports.values() for label, ranks in report.groups.items()}


def writers(reports: Mapping[int, RankReport], verdict: HangVerdict) -> set[int]:
    """The ranks that have worked out `verdict`, as they wait; without those to blame, where there are others."""
    waiting = {rank for rank, report in reports.items() if waits(report)}
    return waiting - {*verdict.ranks} or waiting


def waits(report: RankReport) -> bool:
    """Whether the rank is in a collective."""
    return any(not call.ended for call in report.calls.values())
