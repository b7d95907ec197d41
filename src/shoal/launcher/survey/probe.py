"""The probe of `shoal doctor --hosts`, on each host: tells of the host, listens for peers, measures links when asked.

    python -m shoal.launcher.survey.probe          speaks `messages` on standard input and output

It changes nothing, imports no torch, and ends with its input. While it runs it listens on one port of every interface,
where only probes with the doctor's token are answered.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import platform
import resource
import shutil
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from shoal.launcher import versions
from shoal.launcher.doctor import findings
from shoal.launcher.environment import is_secret
from shoal.launcher.sockets import BACKLOG, obstacle
from shoal.launcher.survey.messages import Begin, Host, HostFacts, Leftover, Measure, Route, SurveyedLink

# The link between two hosts, measured over one TCP connection: round trip, rate, and how far the clocks are apart.
#
# The peer's clock is ahead by (Mills, RFC 5905, section 8)
#
#     ((t2 - t1) + (t3 - t4)) / 2,
#
# with t1 and t4 taken here, when a ping leaves and its answer comes, t2 and t3 there. Of all pings the one with the
# shortest round trip counts; half of that round trip bounds the error. The rate is found by bursts that double until
# one takes `LONG_ENOUGH_S` or all of them `MOST_S`: short ones see buffers and slow start, not the link.


PINGS = 40
FIRST_BURST_BYTES, MOST_BURST_BYTES = 64 << 10, 1 << 30
LONG_ENOUGH_S, MOST_S = 0.2, 1.0
PATIENCE_S = 10.0
_CHUNK = bytes(64 << 10)
_TOKEN_BYTES = 64
_REQUEST = struct.Struct("!Q")
_TIMES = struct.Struct("!dd")


@contextmanager
def listening(port: int, token: str) -> Iterator[tuple[int, str | None]]:
    """Answers `measure` on every interface until the end of the block; connections without the token are closed.

    Yields the port, and why it is another than `port` (0: any).
    """
    fault = None
    try:
        listener = _listener(port)
    except OSError as error:
        fault = (error.strerror or str(error)).lower()
        listener = _listener(0)
    with listener:
        threading.Thread(target=_accept, args=(listener, _padded(token)), daemon=True).start()
        yield listener.getsockname()[1], fault


def measure(address: str, port: int, token: str, *, rate: bool = True) -> SurveyedLink:
    """The link to a peer that is `listening`; an `obstacle` where it cannot be reached or does not answer.

    Without `rate` nothing is sent but pings, and `bytes_per_s` is 0.
    """
    if (found := obstacle(address, port)) is not None:
        return SurveyedLink(obstacle=found)
    try:
        with socket.create_connection((address, port), PATIENCE_S) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(_padded(token))
            trips = [_ping(peer) for _ in range(PINGS)]
            bytes_per_s = _rate(peer) if rate else 0.0
    except OSError as error:
        return SurveyedLink(obstacle=f"it took the connection, then: {(error.strerror or str(error)).lower()}")
    return SurveyedLink(
        round_trip_s=statistics.median(trip for trip, _ in trips), bytes_per_s=bytes_per_s, ahead_s=min(trips)[1]
    )


def _ping(peer: socket.socket) -> tuple[float, float]:
    """Its round trip, and how far the peer's clock is ahead by it, in seconds."""
    start, t1 = time.perf_counter(), time.time()
    peer.sendall(_REQUEST.pack(0))
    t2, t3 = _TIMES.unpack(_read(peer, _TIMES.size))
    trip = time.perf_counter() - start
    # t4 is t1 and the time that passed, which a step of the clock in between does not change.
    return trip, ((t2 - t1) + (t3 - (t1 + trip))) / 2


def _rate(peer: socket.socket) -> float:
    size, start = FIRST_BURST_BYTES, time.perf_counter()
    while True:
        begun = time.perf_counter()
        peer.sendall(_REQUEST.pack(size))
        for _ in range(size // len(_CHUNK)):
            peer.sendall(_CHUNK)
        _read(peer, _TIMES.size)
        now = time.perf_counter()
        if now - begun >= LONG_ENOUGH_S or now - start >= MOST_S or size >= MOST_BURST_BYTES:
            return size / (now - begun)
        size *= 2


def _accept(listener: socket.socket, token: bytes) -> None:
    with suppress(OSError):  # closed, at the end
        while True:
            threading.Thread(target=_answer_link, args=(listener.accept()[0], token), daemon=True).start()


def _answer_link(client: socket.socket, token: bytes) -> None:
    buffer = bytearray(256 << 10)
    with client, suppress(OSError):
        client.settimeout(PATIENCE_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_read(client, _TOKEN_BYTES), token):
            return
        while True:
            (left,) = _REQUEST.unpack(_read(client, _REQUEST.size))
            received = time.time()
            while left:
                got = client.recv_into(buffer, min(left, len(buffer)))
                if got == 0:
                    return
                left -= got
            client.sendall(_TIMES.pack(received, time.time()))


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=BACKLOG)


def _read(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(size - len(found))
        if not piece:
            raise ConnectionResetError("the peer closed the connection")
        found += piece
    return bytes(found)


def _padded(token: str) -> bytes:
    return token.encode()[:_TOKEN_BYTES].ljust(_TOKEN_BYTES)


PACKAGE = Path(__file__).parents[2]
COMPARED_VARIABLES = ("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "CUDA_HOME", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
_LIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
_VERBS = ("train", "launch", "sweep", "evaluate", "verify")
_SIOCGIFADDR = 0x8915
_TICKS = os.sysconf("SC_CLK_TCK")


def serve(lines: Iterable[bytes], answers: BinaryIO, environ: Mapping[str, str] = os.environ) -> None:
    """Answers each message of `lines`, until they end."""
    incoming = iter(lines)
    begin = msgspec.json.decode(next(incoming, b"null"), type=Begin | None)
    if begin is None:
        return
    wanted = begin.port if begin.name == begin.hosts[0].name else 0
    with listening(wanted, begin.token) as (port, fault):
        _answer(answers, facts(begin, port, fault, environ))
        for line in incoming:
            asked = msgspec.json.decode(line, type=Measure)
            _answer(answers, measure(asked.peer.address, asked.port, begin.token, rate=asked.rate))


def facts(begin: Begin, port: int, port_fault: str | None, environ: Mapping[str, str]) -> HostFacts:
    """What this host tells of itself; about half a second."""
    folder = Path(begin.folder or Path.cwd())
    return HostFacts(
        host_name=socket.gethostname(),
        port=port,
        port_fault=port_fault,
        route=route_to(begin.hosts[0].address, begin.port),
        addresses={host.name: _resolved(host) for host in begin.hosts},
        versions=_versions(),
        code=code_hash(),
        folder=str(folder),
        folder_free_bytes=shutil.disk_usage(folder).free if folder.is_dir() else None,
        limits={name: resource.getrlimit(getattr(resource, limit))[0] for name, limit in _LIMITS.items()},
        variables={
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(COMPARED_VARIABLES) and not is_secret(name, value)
        },
        leftovers=leftovers(),
        findings=findings(environ),
    )


def route_to(address: str, port: int) -> Route:
    """The kernel's choice towards an address, found without sending anything."""
    try:
        family, kind, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unsent:
            unsent.connect(found)
            own = str(unsent.getsockname()[0])
    except OSError as error:
        return Route(obstacle=(error.strerror or str(error)).lower())
    interface = next((name for _, name in socket.if_nameindex() if own in _addresses_of(name)), None)
    return Route(own, interface, _number(interface, "mtu"), _number(interface, "speed"))


def code_hash() -> str:
    """Of every Python file of Shoal's, by name and content."""
    found = blake3()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE)}\0".encode() + blake3(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def leftovers(processes: Path = Path("/proc")) -> list[Leftover]:
    """The processes of runs on this host, whoever started them; without those above this one."""
    ancestors = _ancestors(processes)
    found = []
    for entry in processes.glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            started_s = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[19]) / _TICKS
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
        if int(entry.name) not in ancestors and (command := _run_command(words)) is not None:
            found.append(
                Leftover(int(entry.name), command, max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s))
            )
    return sorted(found, key=lambda one: one.pid)


def _run_command(words: list[str]) -> str | None:
    """`shoal VERB ...` where these are the words of one that trains, else None."""
    for place in range(1, len(words)):
        if words[place] in _VERBS and (
            Path(words[place - 1]).name == "shoal" and (words[place - 2] == "-m" or place <= 2)
        ):
            return " ".join(["shoal", *words[place : place + 2]])[:100]
    return None


def _ancestors(processes: Path) -> set[int]:
    found, pid = set(), os.getpid()
    while pid > 1 and pid not in found:
        found.add(pid)
        try:
            pid = int((processes / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            break
    return found


def _versions() -> dict[str, str]:
    packages = ("torch", "numpy", "msgspec", "blake3", *versions.EXTRAS.values())
    there = {package: found for package in packages if (found := versions.installed(package)) is not None}
    return {"Python": platform.python_version(), "machine": platform.machine(), **there}


def _resolved(host: Host) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host.address, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _addresses_of(interface: str) -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # an interface without an address
    try:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    except OSError:
        pass  # no IPv6
    return found


def _number(interface: str | None, name: str) -> int | None:
    try:
        found = int(Path(f"/sys/class/net/{interface}/{name}").read_text())
    except (OSError, ValueError):
        return None
    return found if found > 0 else None


def _answer(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
