"""Do the ranks of a group share a host? They find out by sharing memory.

A boot id and a user are not proof enough (containers share the first, and may be kept apart), so the ranks pass each
other segments over Unix sockets (`shoal.comm.shm.segment`).

SHOAL_HOST is part of a host's identity: a lab gives each of its hosts a name, and ranks of two such hosts must not
share memory although the machine would let them.

Note: one round through the store
---------------------------------
A round through the store takes longer than all that ranks say over their streams, so there is one: every rank publishes
its `Introduction`, with the name of its socket, and reads all of them. A rank that has all segments confirms that
on all streams, and returns once all others have confirmed. One that fails before it confirms publishes that it gave up,
and hangs up: so no rank gets all confirmations. Whoever misses one, or sees that a rank gave up, gives up too. All of
them then publish why, read the same answers, and raise the same `Apart`. A rank that has confirmed gives up only where
another rank did before it confirmed, or has ended; one that has ended publishes no reason, and is named for it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.comm.shm.core import CoreMissing, Settings, core_identity
from shoal.comm.shm.segment import Handshake, MappedSegment

HOST_NAME = "SHOAL_HOST"
"""The variable that names the host of a process where one machine plays several."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO, _ECHO = "no: ", "no more: "  # what went wrong here, and what did because of another rank
_GIVEN_UP = "given-up"


class Apart(Exception):
    """The reason why ranks cannot share memory, the same on all of them; `hosts` are those of the ranks, if known."""

    def __init__(self, reason: str, hosts: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.hosts = tuple(hosts)


class Meeting(Protocol):
    """Where ranks tell each other where they are: a `Board`, or that of ranks without torch. Calls end in time."""

    timeout_s: float

    def all_gather(self, key: str, text: str, *, rank: int, ranks: Sequence[int]) -> tuple[str, ...]: ...
    def publish(self, key: str, value: bytes) -> None: ...
    def published(self, key: str) -> bool: ...


class Introduction(msgspec.Struct, frozen=True):
    """What a rank tells the others first: `core` is the build of its core, or else `no_core` says why it has none."""

    host: str
    user: int
    door: str = ""
    core: str = ""
    no_core: str = ""


@dataclass(frozen=True)
class HostMates:
    """What ranks of one host share: a stream to each other rank, and the segments of all, in rank order."""

    streams: dict[int, socket.socket]
    segments: tuple[MappedSegment, ...]


def find_mates(board: Meeting, rank: int, size: int, *, settings: Settings) -> HostMates:
    """Blocks until all ranks have called it. Raises `Apart` or `CoreMissing` on all of them, or returns on all."""

    def exchange(step: str, answer: str) -> tuple[str, ...]:
        answers = board.all_gather(step, answer, rank=rank, ranks=range(size))
        for kind in (_NO, _ECHO):
            if refusal := next((a.removeprefix(kind) for a in answers if a.startswith(kind)), None):
                raise Apart(refusal)
        return answers

    given_up = lambda: board.published(_GIVEN_UP)  # noqa: E731
    with Handshake(rank, size, settings=settings, timeout_s=board.timeout_s, given_up=given_up) as handshake:
        try:
            mine = msgspec.json.encode(_introduction(rank, handshake)).decode()
        except OSError as error:
            mine = f"{_NO}rank {rank}: {error}"
        answers = exchange("introduce", mine)
        doors = _check([msgspec.json.decode(answer, type=Introduction) for answer in answers])
        try:
            handshake.knock(doors[:rank])
            handshake.enter()
            handshake.confirm()
        except OSError as error:
            board.publish(_GIVEN_UP, b"")
            handshake.hang_up()
            exchange("why", f"{_ECHO if isinstance(error, ConnectionError) else _NO}rank {rank}: {error}")
    return HostMates(handshake.streams, tuple(handshake.segments[other] for other in range(size)))


def _introduction(rank: int, handshake: Handshake) -> Introduction:
    host, user = host_identity(), os.getuid()
    try:
        return Introduction(host, user, core=core_identity(), door=handshake.open())
    except CoreMissing as error:
        return Introduction(host, user, no_core=f"rank {rank}: {error}")


def _check(everyone: Sequence[Introduction]) -> list[str]:
    """The ranks' doors. Raises `Apart`, or `CoreMissing` where one of them has no core, or another one."""
    hosts = [each.host for each in everyone]
    if (count := len(set(hosts))) > 1:
        raise Apart(f"ranks on {count} hosts", hosts)
    if (count := len({each.user for each in everyone})) > 1:
        raise Apart(f"ranks of {count} users", hosts)
    if missing := next((each.no_core for each in everyone if each.no_core), None):
        raise CoreMissing(missing)
    if len({each.core for each in everyone}) > 1:
        raise CoreMissing("the ranks have different versions of it")
    return [each.door for each in everyone]


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Equal for processes of one host, different for those of two: the kernel's boot id, and the name in SHOAL_HOST.

    Raises:
        OSError: this is not Linux, or the kernel does not tell.
    """
    if sys.platform != "linux":
        raise OSError(f"shared memory needs Linux, this is {sys.platform}")
    name = environ.get(HOST_NAME, "")
    return _BOOT_ID.read_text().strip() + (f"/{name}" if name else "")
