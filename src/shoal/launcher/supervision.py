"""When the launcher sends which signal, and its event loop.

`Supervision` is a state machine without processes or clocks: events come in with their time (monotonic seconds), what
comes out is the signals to send now.

    a rank fails              the others get `failure_s` to report their own errors, then SIGTERM, then SIGKILL
    a rank leaves with 75     the others are saving, too: they get `saving_s`, then the same
    the user asks to stop     SIGTERM to every rank, without a limit: they finish the step and save
    the user asks twice       SIGKILL to every rank
    a rank is late            SIGABRT to it (`arrival`), then SIGTERM and SIGKILL to every rank

`Watch` feeds it: ends of ranks, signals to the launcher and deadlines, one at a time. One thread a rank waits for that
rank's end, so that an end is noticed at once and nothing polls. All else happens in the thread that calls
`until_all_left`: a pid is signalled and reaped by one thread only.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import EnvironmentFault, Stopped
from shoal.launcher.failure import FAILURE_FOLDER, Failure, write_failure
from shoal.launcher.rank_process import RankProcess
from shoal.launcher.root_cause import Exit
from shoal.standard_output import escape_controls

# Ranks that hang while they start. Nobody waits for them yet, or all hang alike, so that nobody would ever say so.
#
# A rank leaves a file in the launcher's folder when it has come so far that every wait has a limit of its own: after
# its imports, and where replicas join one by one, when it is ready to join. One that has not after
# `run.start_timeout_s` gets SIGABRT: Python then prints where it is (`PYTHONFAULTHANDLER`), which names the line, and
# SIGKILL after `DUMP_S`.


DUMP_S = 2.0
"""What a rank may take to print where it is."""
_FRAME = re.compile(r'^  File "(?P<file>[^<"][^"]*)", line (?P<line>\d+)', re.MULTILINE)
_NEWEST_FIRST = "(most recent call first)"


def say_arrived(environ: Mapping[str, str], *, replica: str = "") -> None:
    """This rank, of `replica` in an elastic run, has started. Under another launcher than Shoal's nobody asks."""
    if folder := environ.get(FAILURE_FOLDER):
        _mark(Path(folder), replica, int(environ["RANK"])).touch()


def has_arrived(folder: Path, process: RankProcess, *, replica: str = "") -> bool:
    """Whether the rank has said so, in the launcher's `folder`."""
    return _mark(folder, replica, process.rank).exists()


def failure_of_late(process: RankProcess, *, start_s: float, stopped: bool) -> Failure:
    """The record of a rank that had not started after `start_s` seconds, once it has printed where it was, or was
    `stopped`.
    """
    found = place_in(process.log_tail())
    place = "its log says where it was" if process.log is not None else "it printed above where it was"
    if found is not None:
        place = f"it was at {found}"
    if stopped:
        place = "it was stopped (SIGSTOP)"
    message = (
        f"rank {process.rank} had not started after {start_s:g} s (run.start_timeout_s): {place}; look what it waits "
        "for there, such as a file system, a lock or the network"
    )
    return Failure(
        rank=process.rank,
        host=socket.gethostname(),
        pid=process.pid,
        time_ns=time.time_ns(),
        exit_code=EnvironmentFault.exit_code,
        kind=EnvironmentFault.__name__,
        message=message,
    )


def place_in(log: str) -> str | None:
    """File and line of the innermost frame with a file in the last stack that `faulthandler` has printed; None without
    one. The main thread's stack is the last.
    """
    _, found, stack = log.rpartition(_NEWEST_FIRST)
    frame = _FRAME.search(stack) if found else None
    return None if frame is None else f"{frame['file']}:{frame['line']}"


def _mark(folder: Path, replica: str, rank: int) -> Path:
    return folder / f"arrived-{replica}-{rank}"


Sends = list[tuple[int, signal.Signals]]


@dataclass(frozen=True)
class Patience:
    """How long ranks may go on after another has left, in seconds.

    `start_s`: how long they may take to start (`arrival`); None: as long as they like. `doing` says what ranks do that
    are told to stop, `then` what is left of their work where they are stopped at once.
    """

    failure_s: float = 2.0
    saving_s: float = 300.0
    terminate_s: float = 1.0
    start_s: float | None = None
    doing: str = "finishing the step and saving"
    then: str = "the next start resumes from the newest checkpoint"


NOTHING_KEPT = Patience(doing="ending the ranks", then="there is no result; start it again")
"""Of ranks that save nothing."""
OWN_SCRIPT = Patience(doing="asking the ranks to end", then="what the script has saved is there")
"""Of ranks of which nobody knows what they save."""


@dataclass
class Supervision:
    """Which ranks run, what they were sent, and when the next signal is due."""

    running: set[int]
    patience: Patience = field(default_factory=Patience)
    sent: dict[int, set[signal.Signals]] = field(default_factory=dict)
    stop_signal: signal.Signals | None = None
    deadline_s: float | None = None
    _next: signal.Signals = signal.SIGTERM

    def on_exit(self, rank: int, code: int, *, now_s: float) -> None:
        """A rank has gone, with an exit code as `subprocess` gives it (negative for a signal)."""
        self.running.discard(rank)
        if code == 0:
            return
        wait_s = self.patience.saving_s if code == Stopped.exit_code else self.patience.failure_s
        # A failure shortens the long patience; nothing lengthens one that already runs.
        if self.deadline_s is None or now_s + wait_s < self.deadline_s:
            self.deadline_s = now_s + wait_s

    def on_signal(self, number: signal.Signals) -> Sends:
        """The launcher was asked to stop. Which signals are one request is decided where they come
        (`spawn.listening`), and not when a busy launcher hears of them."""
        first, self.stop_signal = self.stop_signal is None, number
        return self._send(signal.SIGTERM if first else signal.SIGKILL)

    def on_late(self, rank: int, *, now_s: float) -> Sends:
        """A rank has not started in time: it gets `DUMP_S` to print where it is."""
        self.deadline_s = min(self.deadline_s or math.inf, now_s + DUMP_S)
        return [(rank, signal.SIGABRT)]

    def on_time(self, now_s: float) -> Sends:
        """Time has gone by: once the deadline is over SIGTERM is due, and `terminate_s` later SIGKILL."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        number, self._next = self._next, signal.SIGKILL
        self.deadline_s = now_s + self.patience.terminate_s
        return self._send(number)

    def sent_by_launcher(self, rank: int, code: int) -> bool:
        """Whether this exit code is a signal that the launcher sent (ranks may also report signal n as 128 + n)."""
        return any(code in (-number, 128 + number) for number in self.sent.get(rank, ()))

    def _send(self, number: signal.Signals) -> Sends:
        for rank in self.running:
            self.sent.setdefault(rank, set()).add(number)
        return [(rank, number) for rank in sorted(self.running)]


class StartOver:
    """All ranks should have started by now."""


@dataclass
class Watch:
    """The ranks, what happens to them, and how they ended. `folder`: the launcher's own, where ranks leave records."""

    supervision: Supervision
    folder: Path = field(default_factory=Path)
    events: queue.SimpleQueue[RankProcess | signal.Signals | StartOver] = field(default_factory=queue.SimpleQueue)
    ranks: list[RankProcess] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    stopped: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)

    def until_all_left(self) -> None:
        """React to ends, signals and deadlines until no rank runs."""
        for rank in self.ranks:
            threading.Thread(target=self._announce_end, args=(rank,), daemon=True).start()
        start_s = self.supervision.patience.start_s
        timer = None if start_s is None else threading.Timer(start_s, self.events.put, (StartOver(),))
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            while self.supervision.running:
                self._react(self._next_event())
        finally:
            if timer is not None:
                timer.cancel()

    def _announce_end(self, rank: RankProcess) -> None:
        rank.wait()
        self.events.put(rank)

    def _next_event(self) -> RankProcess | signal.Signals | StartOver | None:
        deadline_s = self.supervision.deadline_s
        try:
            return self.events.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return None

    def _react(self, event: RankProcess | signal.Signals | StartOver | None) -> None:
        now_s = time.monotonic()
        if isinstance(event, RankProcess):
            self._note_end(event, now_s)
        elif isinstance(event, StartOver):
            self._note_late(now_s)
        elif event is not None:
            first = self.supervision.stop_signal is None
            self._send(self.supervision.on_signal(event))
            if first:
                say(f"{event.name}: {self.supervision.patience.doing}; a second one stops at once")
        self._note_stopped()
        self._send(self.supervision.on_time(now_s))

    def _note_end(self, rank: RankProcess, now_s: float) -> None:
        time_ns = time.time_ns()
        code = rank.reap()
        by_launcher = self.supervision.sent_by_launcher(rank.rank, code)
        if rank.rank in self.late:
            start_s = self.supervision.patience.start_s or 0.0
            failure = failure_of_late(rank, start_s=start_s, stopped=rank.rank in self.stopped)
            write_failure(failure, self.folder)
            code, by_launcher = failure.exit_code, False
        self.exits.append(Exit(rank.rank, rank.pid, code, time_ns, by_launcher=by_launcher))
        self.supervision.on_exit(rank.rank, code, now_s=now_s)

    def _note_late(self, now_s: float) -> None:
        for rank in self.ranks:
            if rank.rank in self.supervision.running and not has_arrived(self.folder, rank):
                self.late.add(rank.rank)
                self._send(self.supervision.on_late(rank.rank, now_s=now_s))

    def _note_stopped(self) -> None:
        # Only once somebody has left: until then a stopped rank is the user's own business.
        if self.exits or self.late:
            held = (rank for rank in self.ranks if rank.rank in self.supervision.running and rank.is_stopped())
            self.stopped |= {rank.rank: rank.pid for rank in held}

    def _send(self, sending: Sends) -> None:
        processes = {process.rank: process for process in self.ranks}
        for rank, number in sending:
            processes[rank].send(number)


def say(text: str) -> None:
    """Tell the user, on standard error."""
    # The terminal may be gone (SIGHUP); the ranks still have to be watched.
    with contextlib.suppress(OSError):
        print(escape_controls(text, encoding=sys.stderr.encoding or "utf-8"), file=sys.stderr, flush=True)
