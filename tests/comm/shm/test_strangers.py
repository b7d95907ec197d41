"""Another local user cannot reach the memory that ranks share: not by the socket, nor by a name, nor through /proc."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.comm.shm.core import Settings
from shoal.comm.shm.host import Handshake
from tests.waiting import HANG_S

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def as_stranger(attempt: Callable[[], object]) -> str:
    """The name of the error that `attempt` raises for another user; "" where it succeeds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = ""
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempt()
        except OSError as error:
            found = type(error).__name__
        os.write(write, found.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def handshake() -> Iterator[Handshake]:
    with Handshake(0, 2, settings=Settings(), timeout_s=HANG_S) as found:
        yield found


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(path)


def test_the_socket_is_in_a_folder_of_its_owner_alone(handshake: Handshake) -> None:
    """Another user can neither list the folder nor connect; the owner can."""
    door = handshake.open()
    assert Path(door).parent.stat().st_mode & 0o777 == 0o700
    assert as_stranger(lambda: os.listdir(Path(door).parent)) == "PermissionError"
    assert as_stranger(lambda: connect(door)) == "PermissionError"
    connect(door)


def test_what_a_killed_rank_leaves_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that dies by SIGKILL in its handshake cannot remove its folder; the next one does, and leaves its own
    alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    child = os.fork()
    if child == 0:
        begun = Handshake(0, 2, settings=Settings(), timeout_s=HANG_S)
        begun.open()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    with Handshake(0, 2, settings=Settings(), timeout_s=HANG_S) as later:
        door = Path(later.open())
        assert list(tmp_path.iterdir()) == [door.parent]
        assert door.parent != left
    assert not list(tmp_path.iterdir())


def test_memory_is_not_reached_through_proc(handshake: Handshake) -> None:
    """The segment has no name in a file system, and descriptors and memory of another user's process are closed."""
    handshake.open()
    segment = next(
        number for number in map(int, os.listdir("/proc/self/fd")) if _target(number).startswith("/memfd:shoal")
    )
    assert os.fstat(segment).st_nlink == 0
    pid = os.getpid()
    assert as_stranger(lambda: os.open(f"/proc/{pid}/fd/{segment}", os.O_RDONLY)) == "PermissionError"
    assert as_stranger(lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY)) == "PermissionError"
    with open(f"/proc/{pid}/fd/{segment}", "rb"):
        pass  # the owner can: the path is the right one


def _target(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
