"""The probe of `shoal doctor --hosts`, on each host: tells of the host, listens for peers, measures links when asked.

    python -m shoal.launch.survey.probe          speaks `messages` on standard input and output

It changes nothing, imports no torch, and ends with its input. While it runs it listens on one port of every interface,
where only probes with the doctor's token are answered.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from shoal.launch import versions
from shoal.launch.doctor import findings
from shoal.launch.secret_names import is_secret
from shoal.launch.survey.link import listening, measure
from shoal.launch.survey.messages import Begin, Host, HostFacts, Leftover, Measure, Route

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
