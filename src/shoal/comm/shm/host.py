"""Do the ranks of a group share a host? They find out by sharing memory.

A boot id and a user are not proof enough (containers share the first, and may be kept apart), so the ranks pass each
other segments over Unix sockets.

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

import fcntl
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from shoal.comm.shm.core import Core, CoreMissing, Settings, core_identity, load_core

# Segments: memory of one process that the other ranks of its host map too.
#
# A segment is an anonymous file (memfd): it has no name that could leak or be guessed, and it is gone with the last
# process that maps it. Its size is sealed, so that no peer can truncate it under a reader. Descriptors are needed only
# to pass a segment on; a mapping outlives them.


def create_segment(size_bytes: int, *, name: str = "shoal") -> int:
    """The descriptor of a new segment of zeros. The kernel allocates each page when it is first written.

    `name` appears in a process's list of mappings only: nobody can open a segment by it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


class MappedSegment:
    """A segment in this process's memory, unmapped when it is dropped, unless the core takes it over.

    Raises `OSError` where it cannot be mapped.
    """

    def __init__(self, core: Core, descriptor: int, size_bytes: int) -> None:
        self.address = core.shoal_map(descriptor, size_bytes)
        if self.address is None:
            raise OSError(f"cannot map {size_bytes} shared bytes: no memory, or ranks run different versions")
        self._unmap = weakref.finalize(self, core.shoal_unmap, self.address, size_bytes)
        self._unmap.atexit = False

    def hand_over(self) -> int:
        """The address, for the core, which unmaps it."""
        self._unmap.detach()
        return self.address


def window_name() -> str:
    """The name of the segments that this process gives out as memory for tensors (`Transport.allocate`)."""
    return f"shoal-window-{os.getpid()}"


def windows() -> list[range]:
    """Addresses of the tensor memory that this process has allocated in segments and still maps, in whole pages."""
    found = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [fields[0] for fields in found if len(fields) == 6 and fields[5].split()[0] == f"/memfd:{window_name()}"]
    return [range(int(start, 16), int(stop, 16)) for start, _, stop in (span.partition("-") for span in spans)]


def window_bytes() -> int:
    """Bytes of all `windows`."""
    return sum(map(len, windows()))


# `Handshake`: the ranks of a host pass each other the descriptors of their segments.
#
# They connect over Unix sockets and pass descriptors as ancillary data (unix(7), SCM_RIGHTS). Afterwards every two
# ranks have a stream between them and each other's segment mapped. Every rank connects to the lower ranks and then
# accepts the higher ones: a listening socket queues connections before it accepts them, so nobody waits in a circle.
#
# The sockets are in the abstract namespace: random names in no folder, gone with the handshake or the process. Any
# process of the same network namespace can connect there, so both ends ask the kernel whose process the other one is
# (SO_PEERCRED) before they say anything, and let go of one of another user. No port is open, and nothing has a name in
# /dev/shm.


_CONFIRMED = b"1"
_CREDENTIALS = struct.Struct("iII")
"""Process, user, group: unix(7)."""
_LOOK_S = 0.1
"""How often a rank that waits for others at its door looks whether one has given up."""


class Handshake:
    """One rank's side: call `open`, and when all ranks have, `knock`, `enter` and `confirm` in this order.

    All four raise `OSError`, and `open` also `CoreMissing`. As a context it leaves no descriptor but those of
    `streams`; where its body raises, not those either. `given_up`: whether another rank has failed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        settings: Settings,
        timeout_s: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._size, self._settings, self._timeout_s = rank, size, settings, timeout_s
        self._given_up = given_up
        self.streams: dict[int, socket.socket] = {}
        self.segments: dict[int, MappedSegment] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Handshake:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stack.close()
        if kind is not None:
            self.hang_up()

    def open(self) -> str:
        """The name of this rank's door. Raises `CoreMissing` before it makes anything."""
        self._core = load_core()
        self._segment_bytes = self._core.shoal_segment_bytes(self._size, self._settings)
        self._door = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._door.settimeout(_LOOK_S)
        self._door.bind(_abstract(name := f"shoal-{secrets.token_hex(16)}"))
        self._door.listen(self._size)
        self._own = create_segment(self._segment_bytes)
        self._stack.callback(os.close, self._own)
        self.segments[self._rank] = MappedSegment(self._core, self._own, self._segment_bytes)
        return name

    def knock(self, doors: Sequence[str]) -> None:
        """At the doors of all lower ranks, in rank order, each with this rank's segment in hand."""
        for rank, name in enumerate(doors):
            stream = self.streams[rank] = socket.socket(socket.AF_UNIX)
            stream.settimeout(self._timeout_s)
            try:
                stream.connect(_abstract(name))
            except ConnectionRefusedError:
                if self._given_up():
                    raise  # and its door is closed
                raise OSError(f"nobody listens at the door of rank {rank}: another network namespace?") from None
            if (user := _user_behind(stream)) != os.geteuid():
                raise PermissionError(f"the door of rank {rank} is that of user {user}")
            self._give(stream)

    def enter(self) -> None:
        """Exchanges segments over all streams."""
        lower = list(self.streams.items())
        for _ in range(self._rank + 1, self._size):
            self._let_in()
        for rank, stream in lower:
            self._take(stream, expected=rank)

    def confirm(self) -> None:
        """Says on every stream that all segments are here, and hears so from everybody."""
        for stream in self.streams.values():
            stream.sendall(_CONFIRMED)
        for rank, stream in self.streams.items():
            if stream.recv(len(_CONFIRMED)) != _CONFIRMED:
                raise ConnectionError(f"rank {rank} hung up while segments were exchanged")
            stream.settimeout(None)

    def hang_up(self) -> None:
        """Lets go of those who wait at the door or on a stream."""
        self._stack.close()
        for stream in self.streams.values():
            stream.close()

    def _let_in(self) -> None:
        stream = self._next_visitor()
        stream.settimeout(self._timeout_s)
        try:
            rank = self._take(stream)
        except OSError:
            stream.close()
            raise
        self.streams[rank] = stream
        self._give(stream)

    def _next_visitor(self) -> socket.socket:
        end_s = time.monotonic() + self._timeout_s
        while True:
            try:
                stream = self._door.accept()[0]
            except TimeoutError:
                if time.monotonic() > end_s:
                    raise
                if self._given_up():
                    raise ConnectionError("a rank gave up while segments were exchanged") from None
                continue
            if _user_behind(stream) == os.geteuid():
                return stream
            stream.close()

    def _give(self, stream: socket.socket) -> None:
        socket.send_fds(stream, [self._rank.to_bytes(4, "big")], [self._own])

    def _take(self, stream: socket.socket, expected: int | None = None) -> int:
        message, descriptors, _, _ = socket.recv_fds(stream, 4, 1)
        rank = int.from_bytes(message, "big")
        try:
            if len(descriptors) != 1 or expected not in (None, rank):
                raise ConnectionError("a peer hung up while segments were exchanged")
            self.segments[rank] = MappedSegment(self._core, descriptors[0], self._segment_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return rank


def _abstract(name: str) -> bytes:
    return b"\0" + name.encode()


def _user_behind(stream: socket.socket) -> int:
    """Whose process is at the other end."""
    credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]


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
