"""Finding out whether the ranks of a group share a host, by doing it: each hands its segment to every other.

A boot id and a user are not proof enough (containers share the first, and may not see each other's files), so the ranks
connect over Unix sockets in private folders and pass descriptors. After each step all ranks say through the store how
it went. Since all read the same answers, all come to the same end: mates, or one reason why not.

The folders are gone before the first collective; no port is open, and nothing has a name in /dev/shm.

SHOAL_HOST is part of a host's identity: a lab gives each of its hosts a name, and ranks of two such hosts must not
share memory although the machine would let them.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.diagnosis import introduce
from shoal.comm.shm.meeting import Handshake, Segment

HOST_NAME = "SHOAL_HOST"
"""The variable that names the host of a process where one machine plays several."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO, _ECHO = "no: ", "no more: "  # what went wrong here, and what did because of another rank


@dataclass(frozen=True)
class HostMates(Generic[Segment]):
    """What ranks of one host share: a stream to each other rank, and the segments of all, in rank order."""

    streams: dict[int, socket.socket]
    segments: tuple[Segment, ...]


class Apart(Exception):
    """The reason why ranks cannot share memory, the same on all of them."""


def find_mates(
    store: Store,
    rank: int,
    size: int,
    *,
    segment_bytes: int,
    map_segment: Callable[[int, int], Segment],
    timeout_s: float,
) -> HostMates[Segment]:
    """Blocks until all ranks have called it. Raises `Apart` on all of them, or returns on all of them."""

    def agree(step: str, attempt: Callable[[], str]) -> tuple[str, ...]:
        try:
            answer = attempt()
        except OSError as error:
            answer = f"{_ECHO if isinstance(error, ConnectionError) else _NO}rank {rank}: {error}"
        answers = introduce(PrefixStore(f"shm/{step}", store), rank, size, myself=answer, timeout_s=timeout_s)
        for kind in (_NO, _ECHO):
            if refusal := next((a.removeprefix(kind) for a in answers if a.startswith(kind)), None):
                raise Apart(refusal)
        return answers

    _same_host(agree("host", _host))
    handshake = Handshake(
        rank, size, segment_bytes=segment_bytes, map_segment=map_segment, timeout_s=timeout_s
    )  # fmt: skip
    with handshake:
        doors = agree("open", handshake.open)
        agree("knock", lambda: handshake.knock(doors[:rank]))
        agree("enter", handshake.enter)
    return HostMates(handshake.streams, tuple(handshake.segments[other] for other in range(size)))


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Equal for processes of one host, different for those of two: the kernel's boot id, and the name in SHOAL_HOST.

    Raises:
        OSError: this is not Linux, or the kernel does not tell.
    """
    if sys.platform != "linux":
        raise OSError(f"shared memory needs Linux, this is {sys.platform}")
    name = environ.get(HOST_NAME, "")
    return _BOOT_ID.read_text().strip() + (f"/{name}" if name else "")


def _host() -> str:
    return f"{host_identity()}/{os.getuid()}"


def _same_host(hosts: tuple[str, ...]) -> None:
    if (count := len({host.rpartition("/")[0] for host in hosts})) > 1:
        raise Apart(f"ranks on {count} hosts")
    if (count := len(set(hosts))) > 1:
        raise Apart(f"ranks of {count} users")
