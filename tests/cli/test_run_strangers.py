"""A run that trains, and a stranger at every port of its ranks: another user of the host, without the job's token."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.elastic_runs import gpt_project, set_pace, undisturbed
from tests.cli.project import ranks_of
from tests.comm.shm.test_strangers import as_stranger
from tests.programs import environ_of
from tests.waiting import HANG_S

LISTENS = "0A"
CROWD = 80
"""Connections to each port that say nothing: more than a store keeps."""


def ports_of(pid: int) -> set[int]:
    """At which ports a process listens."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    port_of = {f"socket:[{row[9]}]": int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENS}
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(port_of.get(os.readlink(fd), 0))
    return found - {0}


def harass(port: int, stack: ExitStack) -> None:
    """All that a stranger can do at a port: it stays there until the end of `stack`."""
    crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S)) for _ in range(CROWD)]
    for number, connection in enumerate(crowd):
        words = (b"", b"\0", os.urandom(64), struct.pack(">I", 1 << 31) + bytes(4096), b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(OSError):  # a store has closed it
            connection.sendall(words[number % len(words)])


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/net/tcp").exists(), reason="needs root, to become another user, and /proc"
)
def test_strangers_at_every_port_do_not_disturb_a_run(tmp_path: Path) -> None:
    """Silence, single bytes, garbage, oversized frames and crowds: the run ends as one that nobody visited, and the
    file of its token is closed to other users."""
    own = gpt_project(tmp_path)
    ranks = ("run.processes=2", "run.steps=30")
    plain = undisturbed(own, *ranks)
    set_pace(own, 0.3)
    running = own.start("train", "fixed.toml", *ranks)
    own.wait_for_step(2)
    pids = ranks_of(running)
    token = environ_of(pids[0])["SHOAL_JOB_TOKEN"]
    assert Path(token).is_file()
    assert as_stranger(lambda: os.open(token, os.O_RDONLY)) == "PermissionError"
    ports = {port for pid in pids for port in ports_of(pid)}
    assert int(environ_of(pids[0])["MASTER_PORT"]) in ports
    with ExitStack() as stack:
        for port in ports:
            harass(port, stack)
        set_pace(own, 0.0)
        assert running.wait(HANG_S) == 0, own.said()
    assert own.losses() == plain
    assert not Path(token).exists()
