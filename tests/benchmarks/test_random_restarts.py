"""What `benchmarks.random_restarts` concludes from outcomes made by hand, and how it cuts a process off."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from benchmarks.random_restarts import Fault, Outcome, checks_of, fault_of, row_of
from benchmarks.random_restarts_jobs import JOBS
from benchmarks.struck_processes import cut_connections

STATE = {"model/weight": torch.arange(3.0)}
KILL = Fault("kill", 0.5, 0.0, 3.0)


def holds(fault: Fault = KILL, job: str = "train", **found: Any) -> bool:
    """Whether the row of an outcome, which is a good one but for what was `found`, keeps every promise."""
    good = {"struck": "rank 1", "rank": 1, "codes": [137], "said": "rank 1 was killed", "state": STATE}
    row = row_of(job, 0, fault, Outcome(**{**good, **found}), STATE)
    return all(one["holds"] for one in checks_of([row]))


def test_each_broken_promise_is_found() -> None:
    """Other bits, other names, no state, no culprit, a hang, a process or a name that is left."""
    assert holds()
    wrongs: list[dict[str, Any]] = [
        {"state": {"model/weight": torch.tensor([0.0, 1.0, 3.0])}},
        {"state": {"model/bias": STATE["model/weight"]}},
        {"state": None},
        {"said": "rank 11 was killed"},
        {"hangs": 1},
        {"orphans": 1},
        {"left": ["psm_1"]},
    ]
    for wrong in wrongs:
        assert not holds(**wrong), wrong


def test_what_a_job_does_not_promise_is_not_asked_of_it() -> None:
    """Bits of a run whose order of events decides; a culprit where nothing failed or no rank was struck."""
    assert holds(job="bounded", state=None)
    assert holds(codes=[], said="")
    assert holds(rank=None, said="")


def test_a_full_disk_is_named_as_such() -> None:
    full = Fault("full", 0.5, 0.0, 3.0)
    assert holds(full, rank=None, said="step-00004: No space left on device")
    assert not holds(full, rank=None, said="rank 0 ended")


@pytest.mark.parametrize("job", JOBS)
def test_a_seed_is_one_fault_of_those_of_the_job(job: str) -> None:
    drawn = [fault_of(seed, job) for seed in range(60)]
    assert drawn == [fault_of(seed, job) for seed in range(60)]
    assert {fault.kind for fault in drawn} == set(JOBS[job].faults)


def read_all(pipe: Connection, connection: socket.socket) -> None:
    pipe.send("connected")
    pipe.send(connection.recv(1))


def test_both_ends_of_a_cut_connection_see_its_end() -> None:
    """The one in this process, whose other end is cut in the other."""
    here, there = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as door:
        theirs = socket.create_connection(door.getsockname())
        ours, _ = door.accept()
    process = multiprocessing.get_context("fork").Process(target=read_all, args=(there, theirs))
    process.start()
    theirs.close()
    assert here.recv() == "connected"
    try:
        cut = cut_connections(process.pid or 0)
        if not cut:
            pytest.skip("this process may not trace another")
        assert here.recv() == b""
        process.join()
        assert (process.exitcode, ours.recv(1)) == (0, b"")
    finally:
        ours.close()
        process.kill()
