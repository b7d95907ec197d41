"""What a rehearsal does to a run from outside: packets between two hosts that are delayed or lost, and a disk that
is full.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import EnvironmentFault
from shoal.files import temporary_folder
from shoal.launcher.lab import network
from shoal.launcher.lab.network import inside, ip, tc, why_not

# Two hosts whose every packet passes this process, which delays, drops, changes or answers them.
#
#     host 0   eth0 (10.79.0.1) ==== descriptor   relay   descriptor ==== eth0 (10.79.0.2)   host 1
#
# Each host is a network namespace whose only link is a TUN device (Linux, Documentation/networking/tuntap.rst): the
# kernel hands its packets to whoever holds the descriptor. Packets that are changed get a new checksum (RFC 793, 3.1),
# so that TCP takes them for sound, as it does one in 65,536 by chance.


DEVICE = Path("/dev/net/tun")
ADDRESSES = ("10.79.0.1", "10.79.0.2")
INTERFACE = "eth0"
MTU_BYTES = 9000
DELAY_S, RATE_MBIT = 0.2, 20
"""What `delay` adds to each way, and what `slow_link` leaves of the rate."""
Trouble = Literal["partition", "half_open", "delay", "reset", "flip", "link_down", "slow_link"]
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_TCP, _RST = 6, 0x04
_LEAST_FLIPPED_BYTES = 256
_POLL_S = 0.05


def why_no_relay() -> str | None:
    """Why this process cannot join hosts by a relay, as a sentence with the repair; None where it can."""
    if (reason := why_not()) is not None:
        return reason
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} is not there: load the module tun, or give the container this device"
    return None


@dataclass(frozen=True)
class RelayHost:
    """A host: its address, and what stands before a command to run it there."""

    address: str
    namespace: str

    @property
    def enter(self) -> list[str]:
        return inside(self.namespace)


class Relay:
    """Passes packets between two hosts until `close`. Trouble begins with `begin` and ends with `end`, from any thread.

    `struck`: whether a trouble that strikes once (`reset`, `flip`) has.
    """

    def __init__(self, hosts: tuple[RelayHost, RelayHost], descriptors: tuple[int, int]) -> None:
        self.hosts, self._descriptors = hosts, descriptors
        self._trouble: Trouble | None = None
        self._reset: set[bytes] = set()
        self._late: list[tuple[float, int, int, bytes]] = []
        self._closed = threading.Event()
        self.struck = False
        self._thread = threading.Thread(target=self._work, name="shoal-relay", daemon=True)
        self._thread.start()

    def begin(self, trouble: Trouble) -> None:
        """From now on. Raises `EnvironmentFault` where `ip` or `tc` fails."""
        self._reset.clear()
        self.struck = trouble not in ("reset", "flip")
        self._trouble = trouble
        if trouble == "link_down":
            ip([f"link set {INTERFACE} down"], namespace=self.hosts[1].namespace)
        if trouble == "slow_link":
            for host in self.hosts:
                rate = f"tbf rate {RATE_MBIT}mbit burst 64kb latency 500ms"
                tc([f"qdisc add dev {INTERFACE} root {rate}"], namespace=host.namespace)

    def end(self) -> None:
        """The network is whole again; does nothing where it is."""
        trouble, self._trouble = self._trouble, None
        if trouble == "link_down":
            ip([f"link set {INTERFACE} up"], namespace=self.hosts[1].namespace)
        if trouble == "slow_link":
            for host in self.hosts:
                tc([f"qdisc del dev {INTERFACE} root"], namespace=host.namespace)

    def close(self) -> None:
        """Passes nothing any more."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closed.is_set():
            wait_s = min(_POLL_S, max(0.0, self._late[0][0] - time.monotonic())) if self._late else _POLL_S
            ready, _, _ = select.select(self._descriptors, [], [], wait_s)
            for descriptor in ready:
                with suppress(OSError):  # its link is down
                    self._pass(os.read(descriptor, 1 << 16), self._descriptors.index(descriptor))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, side, packet = heapq.heappop(self._late)
                self._send(packet, side)

    def _pass(self, packet: bytes, side: int) -> None:
        """A packet of host `side`, under the trouble of this moment."""
        trouble = self._trouble
        if trouble == "partition" or (trouble == "half_open" and side == 0):
            return
        if trouble == "delay":
            heapq.heappush(self._late, (time.monotonic() + DELAY_S, len(self._late), 1 - side, packet))
            return
        if trouble == "flip" and not self.struck and (changed := flipped(packet)) is not None:
            packet, self.struck = changed, True
        if trouble == "reset" and (resets := resets_of(packet)) is not None:
            connection = b"".join(sorted((packet[12:16] + resets[1][20:22], packet[16:20] + resets[0][20:22])))
            if connection not in self._reset:
                self._reset.add(connection)
                self.struck = True
                self._send(resets[0], side)
                self._send(resets[1], 1 - side)
                return
        self._send(packet, 1 - side)

    def _send(self, packet: bytes, side: int) -> None:
        with suppress(OSError):  # its link is down, or its queue is full: a packet is lost
            os.write(self._descriptors[side], packet)


@contextmanager
def relay() -> Iterator[Relay]:
    """Two hosts and a relay between them, until the end of the block. Raises `EnvironmentFault` where none can be."""
    if (reason := why_no_relay()) is not None:
        raise EnvironmentFault(reason)
    existing = network.namespaces()
    network.remove_namespaces(network.leftovers(existing))
    prefix = network.free_prefix(existing)
    with ExitStack() as stack:
        hosts: list[RelayHost] = []
        descriptors: list[int] = []
        for number, address in enumerate(ADDRESSES):
            namespace, device = f"{prefix}r{number}", f"shoal{os.getpid() % 100_000}r{number}"
            ip([f"netns add {namespace}"])
            stack.callback(network.remove_namespaces, [namespace])
            descriptors.append(descriptor := _open_tun(device))
            stack.callback(os.close, descriptor)
            ip([f"link set {device} netns {namespace}"])
            ip(
                [
                    "link set lo up",
                    f"link set {device} name {INTERFACE} mtu {MTU_BYTES}",
                    f"addr add {address}/24 dev {INTERFACE}",
                    f"link set {INTERFACE} up",
                ],
                namespace=namespace,
            )
            hosts.append(RelayHost(address, namespace))
        joined = Relay((hosts[0], hosts[1]), (descriptors[0], descriptors[1]))
        stack.callback(joined.close)
        yield joined


def _open_tun(name: str) -> int:
    descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    except OSError as error:
        os.close(descriptor)
        raise EnvironmentFault(
            f"{DEVICE} makes no device ({error.strerror}): give this process CAP_NET_ADMIN"
        ) from error
    return descriptor


def flipped(packet: bytes) -> bytes | None:
    """An IPv4 packet of TCP with one bit in the middle of its payload changed; None where there is little payload."""
    start = _payload(packet)
    if start is None or len(packet) - start < _LEAST_FLIPPED_BYTES:
        return None
    changed = bytearray(packet)
    changed[(start + len(packet)) // 2] ^= 0x40
    return _with_checksum(changed)


def resets_of(packet: bytes) -> tuple[bytes, bytes] | None:
    """The RSTs that end the connection of a packet at its sender and at its receiver (RFC 793, 3.4), each at the number
    that this end expects; None where it carries no data.
    """
    start = _payload(packet)
    if start is None or start == len(packet):
        return None
    tcp = 4 * (packet[0] & 15)
    sender, receiver = packet[12:16], packet[16:20]
    source, destination = packet[tcp : tcp + 2], packet[tcp + 2 : tcp + 4]
    number, acknowledged = packet[tcp + 4 : tcp + 8], packet[tcp + 8 : tcp + 12]
    return (
        _reset(receiver + sender, destination + source, acknowledged),
        _reset(sender + receiver, source + destination, number),
    )


def _reset(addresses: bytes, ports: bytes, number: bytes) -> bytes:
    header = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 64, _TCP, 0) + addresses
    header = header[:10] + struct.pack("!H", _ones_complement(header)) + header[12:]
    return _with_checksum(bytearray(header + ports + number + struct.pack("!IBBHHH", 0, 0x50, _RST, 0, 0, 0)))


def _payload(packet: bytes) -> int | None:
    """Where the payload of a packet of TCP over IPv4 begins; None for any other."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    tcp = 4 * (packet[0] & 15)
    return min(len(packet), tcp + 4 * (packet[tcp + 12] >> 4))


def _with_checksum(packet: bytearray) -> bytes:
    """`packet` with the checksum of its TCP segment made anew, over the pseudo header of IPv4 too."""
    tcp = 4 * (packet[0] & 15)
    packet[tcp + 16 : tcp + 18] = b"\0\0"
    segment = bytes(packet[tcp:])
    pseudo = bytes(packet[12:20]) + struct.pack("!BBH", 0, _TCP, len(segment))
    packet[tcp + 16 : tcp + 18] = struct.pack("!H", _ones_complement(pseudo + segment))
    return bytes(packet)


def _ones_complement(data: bytes) -> int:
    """RFC 1071."""
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


# A run directory on a file system of its own, which a rehearsal fills: a tmpfs of a few megabytes. Needs root.
#
# It is mounted in a mount namespace of this process and its children (mount_namespaces(7)): nobody else sees it, and it
# goes with the last of them, also where they are killed.


FILLER, CHUNK_BYTES = "filler", 1 << 20
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18


def why_no_small_disk() -> str | None:
    """Why there can be none here, as a sentence; None where there can."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "a file system of its own needs root and the command mount"
    with temporary_folder() as folder:
        try:
            with small_disk(folder / "disk", 1 << 20):
                return None
        except EnvironmentFault as error:
            return str(error)


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[None]:
    """`directory` is a file system of that size; its content stays behind when it goes. Raises `EnvironmentFault`."""
    directory.mkdir(parents=True)
    _unshare_mounts()
    made = _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))
    if made.returncode != 0:
        raise EnvironmentFault(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    kept = directory.with_name(f"{directory.name}.kept")
    try:
        yield
    finally:
        end_fill(directory)
        shutil.copytree(directory, kept, symlinks=True)
        _run("umount", "--lazy", str(directory))
    directory.rmdir()
    kept.rename(directory)


def _unshare_mounts() -> None:
    """What this process and its children mount from here on is theirs alone. Raises `EnvironmentFault`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None):
        raise EnvironmentFault(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")


def fill(directory: Path) -> None:
    """Until not a byte is left."""
    with (directory / FILLER).open("wb", buffering=0) as file:
        for size in (CHUNK_BYTES, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def end_fill(directory: Path) -> None:
    """There is space again."""
    (directory / FILLER).unlink(missing_ok=True)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
