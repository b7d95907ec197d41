"""What the launcher of an elastic run does when replicas end: with real processes that only end, and no run."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shoal.coordinator.client import Address, NoGeneration
from shoal.errors import EnvironmentFault
from shoal.fleet import fleet as fleet_module
from shoal.fleet.fleet import Fleet
from shoal.fleet.processes import ReplicaProcesses
from shoal.launcher.failure import FAILURE_FOLDER, failure_of, write_failure
from shoal.launcher.rank_process import RankProcess
from shoal.launcher.spawn import ExitCode
from shoal.launcher.supervision import say_arrived
from shoal.resilience.config import ElasticConfig
from shoal.resilience.events import Committed, Fenced, Formed
from shoal.resilience.preemption import Preemption
from tests.waiting import wait_until

WAITS = "import sys; sys.stdin.read()"
"""Ends at a signal, or with the test."""
STOPS = "import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(75)); print(flush=True); sys.stdin.read()"
"""Ends with 75 at SIGINT."""

DEAF = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
"""Does not answer SIGINT."""


@dataclass
class Processes:
    """Starts processes that run no rank, by the program of their slot."""

    programs: dict[int, str]
    several_hosts: bool = False
    ranks: int = 1
    started: list[int] = field(default_factory=list)

    def start(self, slot: int, name: str, *, late: bool) -> ReplicaProcesses:
        program = self.programs[slot]
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, start_new_session=True)
        if program in (STOPS, DEAF):
            assert process.stdout is not None
            process.stdout.readline()
        self.started.append(slot)
        return ReplicaProcesses(name, slot, [RankProcess(slot, process, None, 0)])


def fleet_of(folder: Path, processes: Processes, **config: Any) -> Fleet:
    """All of its replicas run."""
    elastic = ElasticConfig(max=len(processes.programs), **config)
    nowhere = Address("127.0.0.1", 1, b"x" * 32)  # nobody listens: it is told of no end
    fleet = Fleet(elastic, 100, nowhere, folder, queue.SimpleQueue(), cast(Any, processes), folder)
    for slot in processes.programs:
        fleet.start(slot)
    return fleet


def names(fleet: Fleet) -> dict[int, str]:
    return {replica.slot: name for name, replica in fleet.running.items()}


def to_the_end(fleet: Fleet) -> ExitCode:
    while fleet.running:
        fleet.react()
    return fleet.conclude()


def end_of(fleet: Fleet, slot: int) -> subprocess.Popen[bytes]:
    return fleet.running[names(fleet)[slot]].ranks[0].process


def test_spares_stop_when_all_members_have_left(tmp_path: Path) -> None:
    """Fewer than `min` would wait for others in vain: they are asked to stop, and the run ends with 75."""
    fleet = fleet_of(tmp_path, Processes({0: "exit(75)", 1: "exit(75)", 2: STOPS}), min=2)
    members = tuple(names(fleet)[slot] for slot in (0, 1))
    fleet.members = members
    assert to_the_end(fleet) == 75
    assert cast(Processes, fleet.starter).started == [0, 1, 2]


@pytest.mark.slow
def test_a_replica_that_found_no_generation_ends_the_run(tmp_path: Path) -> None:
    """Exit code 3 at once: another in its place would wait for as long."""
    fleet = fleet_of(tmp_path, Processes({0: "input(); exit(3)", 1: WAITS}))
    process = end_of(fleet, 0)
    record = failure_of(NoGeneration("replica a waited 9 s for a generation"), 0)
    write_failure(msgspec.structs.replace(record, pid=process.pid), tmp_path)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert to_the_end(fleet) == 3
    assert cast(Processes, fleet.starter).started == [0, 1]


def test_a_step_forgets_the_replacements_of_its_members_alone(tmp_path: Path) -> None:
    """A slot whose replicas end before they train is given up, however many steps the others take."""
    fleet = fleet_of(tmp_path, Processes({0: WAITS, 1: WAITS}))
    fleet.replaced = Counter({0: 2, 1: 2})
    fleet.events.put(Formed(1, (names(fleet)[1],), (), 0, 0))
    fleet.events.put(Committed(1, 1, 0, 8))
    fleet.react()
    fleet.react()
    assert fleet.replaced == Counter({0: 2})
    fleet.events.put(EnvironmentFault("the test ends"))
    fleet.events.put(signal.SIGTERM)
    to_the_end(fleet)


def test_a_member_that_is_done_ends_the_run_without_a_coordinator_too(tmp_path: Path) -> None:
    """Nobody says that the last step was taken; who stands by is asked to stop, and the run is done."""
    fleet = fleet_of(tmp_path, Processes({0: "exit(0)", 1: STOPS}))
    fleet.events.put(EnvironmentFault("the journal's disk is full"))
    assert to_the_end(fleet) == 0
    assert cast(Processes, fleet.starter).started == [0, 1]


def test_a_loss_without_a_coordinator_asks_the_others_to_save(tmp_path: Path) -> None:
    """None can join, and no generation can follow: the survivors are told to stop, which saves, and the run ends with
    3 and a sentence."""
    fleet = fleet_of(tmp_path, Processes({0: "input(); exit(1)", 1: STOPS}), min=1)
    fleet.warn = (warned := list[str]()).append
    fleet.events.put(EnvironmentFault("the journal's disk is full"))
    fleet.react()
    process = end_of(fleet, 0)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    code = to_the_end(fleet)
    assert code == 3
    assert "without the coordinator none can join in its place" in code.sentence
    assert [end.code for end in fleet.exits] == [1, 75]
    assert "the coordinator has ended, and training goes on until a replica is lost" in warned[0]
    assert "ended: exit code 1; without the coordinator none can join" in warned[1]


def test_fences_and_preemption_are_warned_of(tmp_path: Path) -> None:
    """Whoever hears the launcher's warnings hears who was fenced and why, and that the host is taken away."""
    fleet = fleet_of(tmp_path, Processes({0: WAITS, 1: WAITS}))
    fleet.warn = (warned := list[str]()).append
    name = names(fleet)[1]
    fleet.events.put(Fenced(name, "its rank 0 was silent for 6.0 s"))
    fleet.events.put(Preemption("the file notice is there"))
    fleet.react()
    fleet.react()
    assert warned[0] == f"{name} is fenced: its rank 0 was silent for 6.0 s"
    assert warned[1].startswith("the file notice is there")
    fleet.events.put(signal.SIGTERM)
    to_the_end(fleet)


def test_a_host_whose_replicas_only_stood_by_has_done_its_part(tmp_path: Path) -> None:
    """The run is over, on other hosts: exit code 0."""
    fleet = fleet_of(tmp_path, Processes({0: WAITS}, several_hosts=True))
    fleet.events.put(Formed(1, ("elsewhere",), (), 100, 800))
    assert to_the_end(fleet) == 0


def test_a_replica_that_is_stopped_before_it_joins_is_ended_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not know it, and fences nobody: the launcher ends it after twice `silence_s`, though other
    replicas keep it busy. One that goes on in time stays."""
    now_s = [0.0]
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], time=time.time))
    fleet = fleet_of(tmp_path, Processes({0: WAITS, 1: WAITS}), silence_s=1.0)
    fleet.warn = (warned := list[str]()).append
    name, stopped, paused = names(fleet)[1], end_of(fleet, 1), end_of(fleet, 0)

    def look(at_s: float) -> None:
        now_s[0] = at_s
        fleet.events.put(Committed(1, 1, 0, 8))
        fleet.react()

    for process in (stopped, paused):
        process.send_signal(signal.SIGSTOP)
    wait_until(lambda: all(replica.ranks[0].is_stopped() for replica in fleet.running.values()))
    look(0.0)
    look(1.5)
    assert not warned
    paused.send_signal(signal.SIGCONT)
    wait_until(lambda: not fleet.running[names(fleet)[0]].ranks[0].is_stopped())
    look(2.0)
    while len(cast(Processes, fleet.starter).started) == 2:
        fleet.react()
    assert warned == [
        f"{name} (pid {stopped.pid}) has been stopped for 2 s: it is ended",
        f"{name} (pid {stopped.pid}) ended: killed by SIGKILL; another takes its place",
    ]
    assert end_of(fleet, 0) is paused
    fleet.events.put(signal.SIGTERM)
    to_the_end(fleet)


def test_a_replica_that_is_not_ready_to_join_in_time_is_named_and_replaced(tmp_path: Path) -> None:
    """It hangs in its imports, where the coordinator does not know it: nobody else would end it. One that is ready
    stays."""
    fleet = fleet_of(tmp_path, Processes({0: WAITS, 1: WAITS}))
    fleet.warn = (warned := list[str]()).append
    ready = names(fleet)[0]
    say_arrived({FAILURE_FOLDER: str(tmp_path), "RANK": "0"}, replica=ready)
    late, process = names(fleet)[1], end_of(fleet, 1)
    fleet.start_s = 0.0
    while len(cast(Processes, fleet.starter).started) == 2:
        fleet.react()
    fleet.start_s = None
    assert warned[0].startswith(f"{late} (pid {process.pid}) ended: EnvironmentFault: rank 1 had not started after 0 s")
    assert warned[0].endswith("; another takes its place")
    assert names(fleet)[0] == ready
    fleet.events.put(signal.SIGTERM)
    to_the_end(fleet)


@pytest.mark.slow
def test_a_replica_that_is_stopped_does_not_hold_up_the_end_of_a_run_nor_change_its_code(tmp_path: Path) -> None:
    """The user asks the run to stop. Those that can have saved; one that is stopped is ended, by the launcher or by the
    coordinator's fence, and the code is 75."""
    for fenced in (False, True):
        fleet = fleet_of(tmp_path, Processes({0: STOPS, 1: DEAF}), silence_s=1.0)
        name, stopped = names(fleet)[1], end_of(fleet, 1)
        if not fenced:
            stopped.send_signal(signal.SIGSTOP)
        fleet.events.put(signal.SIGTERM)
        if fenced:
            fleet.events.put(Fenced(name, "its rank 0 was silent for 1.0 s"))
        assert to_the_end(fleet) == 75, fenced
        assert cast(Processes, fleet.starter).started == [0, 1]
