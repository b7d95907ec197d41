"""Another local user cannot reach the memory that ranks share: not by the socket, nor by a name, nor through /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.comm.shm.core import Settings, core_settings
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


def settings() -> Settings:
    """Of a group of two."""
    return core_settings(2, timeout_s=HANG_S, threads=1)


@pytest.fixture
def handshake() -> Iterator[Handshake]:
    with Handshake(0, 2, settings=settings(), timeout_s=HANG_S) as found:
        yield found


def heard_at(name: str) -> bytes:
    """What a process hears that connects there: nothing, when it is let go."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(HANG_S)
        stream.connect(b"\0" + name.encode())
        return stream.recv(1)


def hears_nothing(name: str) -> None:
    """Fails where it hears something."""
    if heard_at(name):
        raise ConnectionError("it was spoken to")


def test_a_process_of_another_user_is_let_go_and_holds_nobody_up() -> None:
    """It comes first, through the same door. The rank that comes after it gets in."""
    with (
        Handshake(0, 2, settings=settings(), timeout_s=HANG_S) as first,
        Handshake(1, 2, settings=settings(), timeout_s=HANG_S) as second,
        ThreadPoolExecutor(3) as pool,
    ):
        door = first.open()
        second.open()
        stranger = pool.submit(as_stranger, lambda: hears_nothing(door))
        entering = pool.submit(first.enter)
        assert stranger.result(HANG_S) == ""
        assert not entering.done()
        second.knock([door])
        pool.submit(second.enter).result(HANG_S)
        entering.result(HANG_S)
        assert set(first.segments) == set(second.segments) == {0, 1}


def test_a_rank_says_nothing_at_the_door_of_another_user() -> None:
    """Somebody else listens there: it is refused, and gets no descriptor."""
    name = f"shoal-test-{os.getpid()}"
    ready_here, ready_there = socket.socketpair()

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(b"\0" + name.encode())
            door.listen(1)
            ready_there.send(b"1")
            visitor, _ = door.accept()
            if visitor.recv(1):
                raise ConnectionError("it was spoken to")

    with Handshake(1, 2, settings=settings(), timeout_s=HANG_S) as handshake, ThreadPoolExecutor(1) as pool:
        handshake.open()
        stranger = pool.submit(as_stranger, listen)
        ready_here.recv(1)
        with pytest.raises(PermissionError, match=f"the door of rank 0 is that of user {NOBODY}"):
            handshake.knock([name])
        handshake.hang_up()
        assert stranger.result(HANG_S) == ""


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
