"""The launcher's side of an elastic run: whom a stop reaches, and how."""

from __future__ import annotations

import os
import queue
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.errors import Stopped
from shoal.fleet.fleet import Fleet
from shoal.launcher.failure import FAILURE_FOLDER, Failure, write_failure
from shoal.launcher.root_cause import Exit
from shoal.launcher.supervision import say_arrived
from shoal.resilience.config import ElasticConfig


@dataclass
class Rank:
    rank: int
    pid: int


@dataclass
class Replica:
    name: str
    ranks: list[Rank]
    sent: list[int] = field(default_factory=list)

    def send(self, number: int, *, as_end: bool = False) -> None:
        self.sent.append(number)


def test_a_stop_ends_a_replacement_that_still_starts_at_once(tmp_path: Path) -> None:
    """A member and a spare that is ready are asked to save; SIGINT in an interpreter that starts would make it end with
    code 1, and the run with it."""
    anything: Any = None
    fleet = Fleet(ElasticConfig(max=3), 10, anything, tmp_path, queue.SimpleQueue(), anything, tmp_path)
    found = {name: Replica(name, [Rank(rank, 1000 + rank)]) for rank, name in enumerate(("member", "spare", "starts"))}
    fleet.running = found  # pyright: ignore[reportAttributeAccessIssue]
    environ = {**os.environ, FAILURE_FOLDER: str(tmp_path), "RANK": "1"}
    say_arrived(environ, replica="spare")
    fleet._send_all(signal.SIGINT)
    assert [one.sent for one in found.values()] == [[signal.SIGINT]] * 3, "nobody trains: all are asked"
    fleet.members = ("member",)
    fleet._send_all(signal.SIGINT)
    assert [one.sent[1:] for one in found.values()] == [[signal.SIGINT], [signal.SIGINT], [signal.SIGKILL]]


def test_a_loss_just_before_a_stop_is_no_failure(tmp_path: Path) -> None:
    """A replica is killed, and before another takes its place the run is asked to stop: the others save, and the run
    has stopped. A rank that failed by itself meanwhile has failed, and so has a run of which nobody saved.
    """

    def concluded(*exits: Exit) -> int:
        anything: Any = None
        fleet = Fleet(ElasticConfig(max=3), 10, anything, tmp_path, queue.SimpleQueue(), anything, tmp_path)
        starter: Any = SimpleNamespace(ranks=1, several_hosts=False)
        fleet.starter, fleet.stop_signal, fleet.exits = starter, signal.SIGTERM, list(exits)
        return fleet.conclude()

    killed, saved = Exit(0, 1000, -signal.SIGKILL, 1), Exit(1, 1001, Stopped.exit_code, 2)
    assert concluded(killed, saved) == Stopped.exit_code
    assert concluded(killed) == 128 + signal.SIGKILL
    own = Failure(rank=2, host="here", pid=1002, time_ns=3, exit_code=1, kind="ValueError", message="of its own")
    write_failure(own, tmp_path)
    assert concluded(killed, saved, Exit(2, 1002, 1, 3)) == 1
