"""The launcher's event loop: ends of ranks, signals to the launcher and deadlines, one at a time.

One thread a rank waits for that rank's end, so that an end is noticed at once and nothing polls. All else happens in
the thread that calls `until_all_left`: a pid is signalled and reaped by one thread only.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

from shoal.launch.rank_process import RankProcess
from shoal.launch.root_cause import Exit
from shoal.launch.supervision import Sending, Supervision


@dataclass
class Watch:
    """The ranks, what happens to them, and how they ended."""

    supervision: Supervision
    events: queue.SimpleQueue[RankProcess | signal.Signals] = field(default_factory=queue.SimpleQueue)
    ranks: list[RankProcess] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    stopped: dict[int, int] = field(default_factory=dict)

    def until_all_left(self) -> None:
        """React to ends, signals and deadlines until no rank runs."""
        for rank in self.ranks:
            threading.Thread(target=self._announce_end, args=(rank,), daemon=True).start()
        while self.supervision.running:
            self._react(self._next_event())

    def _announce_end(self, rank: RankProcess) -> None:
        rank.wait()
        self.events.put(rank)

    def _next_event(self) -> RankProcess | signal.Signals | None:
        deadline_s = self.supervision.deadline_s
        try:
            return self.events.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return None

    def _react(self, event: RankProcess | signal.Signals | None) -> None:
        now_s = time.monotonic()
        if isinstance(event, RankProcess):
            self._note_end(event, now_s)
        elif event is not None:
            first = self.supervision.asked_by is None
            self._send(self.supervision.asked(event, now_s=now_s))
            if first:
                say(f"{event.name}: finishing the step and saving; press again to stop at once")
        self._note_stopped()
        self._send(self.supervision.passed(now_s))

    def _note_end(self, rank: RankProcess, now_s: float) -> None:
        time_ns = time.time_ns()
        code = rank.reap()
        self.exits.append(Exit(rank.rank, rank.pid, code, time_ns, ours=self.supervision.is_ours(rank.rank, code)))
        self.supervision.left(rank.rank, code, now_s=now_s)

    def _note_stopped(self) -> None:
        # Only once somebody has left: until then a stopped rank is the user's own business.
        if self.exits:
            held = (rank for rank in self.ranks if rank.rank in self.supervision.running and rank.is_stopped())
            self.stopped |= {rank.rank: rank.pid for rank in held}

    def _send(self, sending: Sending) -> None:
        for rank, number in sending:
            self.ranks[rank].send(number)


def say(text: str) -> None:
    """Tell the user, on standard error."""
    # The terminal may be gone (SIGHUP); the ranks still have to be watched.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
