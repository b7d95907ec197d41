"""A lab's network: a namespace for each host, one for the switch between them, and virtual links of given rates.

    host 0   eth0 ====== port0   switch   port1 ====== eth0   host 1
               to1 ------------------------------------- to0          a pair's own line

Both ends of a link are shaped by a token bucket (tbf), so that its rate holds each way; what would wait longer than the
buffer is dropped, as a switch does. Long packets that the kernel cuts late are kept below the bucket's size: a bucket
that is smaller would have every one cut early. Nothing is in the machine's own namespace: addresses and routes of a lab
meet no others, and it is gone when its namespaces are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Environ
from shoal.launcher.lab.lab_file import Lab
from shoal.launcher.rank_process import HostEntry
from shoal.launcher.spawn import ExitCode, run_ranks
from shoal.launcher.supervision import Patience, say

# `ip` and `tc`: whether this process may use them, and running several of their commands at once.


TIMEOUT_S = 30.0
INSTEAD = 'or set lab.network = "throttle", which slows the ranks\' own processes down, approximately'


def why_not() -> str | None:
    """Why this process cannot make a lab, as a sentence with the repair; None where it can."""
    if sys.platform != "linux":
        return f"a lab is made of Linux's network namespaces, and this is {sys.platform}; use Linux, {INSTEAD}"
    if os.geteuid() != 0:
        return f"a lab needs root to make network namespaces, and this is user {os.geteuid()}; use sudo, {INSTEAD}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"a lab needs iproute2, and there is no {' and no '.join(missing)}; apt-get install iproute2, {INSTEAD}"
    return None


def require() -> None:
    """Raises `EnvironmentFault` where this process cannot make a lab."""
    if (reason := why_not()) is not None:
        raise EnvironmentFault(reason)


def ip(commands: Sequence[str], *, namespace: str | None = None) -> str:
    """Runs lines of `ip`, stops at the first that fails, and returns their output. Raises `EnvironmentFault`."""
    return _batch("ip", commands, namespace)


def tc(commands: Sequence[str], *, namespace: str | None = None) -> str:
    """The same of `tc`."""
    return _batch("tc", commands, namespace)


def inside(namespace: str) -> list[str]:
    """What stands before a command that runs in a namespace, in the same process."""
    return ["ip", "netns", "exec", namespace]


def _batch(tool: str, commands: Sequence[str], namespace: str | None) -> str:
    where = ["-n", namespace] if namespace is not None else []
    text = "".join(f"{command}\n" for command in commands)
    try:
        done = subprocess.run(
            [tool, *where, "-batch", "-"],
            input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{tool} could not be run ({error}); {INSTEAD}") from error
    if done.returncode != 0:
        raise EnvironmentFault(
            f"{tool} refused {_refused(commands, done.stderr)!r} ({_reason(done.stderr)}): a lab needs a kernel with "
            f"network namespaces, veth, bridges and tbf, and the right to use them; run it on such a machine, {INSTEAD}"
        )
    return done.stdout


def _refused(commands: Sequence[str], complaint: str) -> str:
    """The line that `Command failed -:3` tells of."""
    number = complaint.rpartition("-:")[2].strip()
    return commands[int(number) - 1] if number.isdigit() and int(number) <= len(commands) else "; ".join(commands)


def _reason(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line and not line.startswith("Command failed")]
    return lines[0].removeprefix("Error: ").rstrip(".") if lines else "without a reason"


# What the kernel counted on the interfaces of this network namespace.


INTERFACES = Path("/sys/class/net")
LOOPBACK = "lo"


@dataclass(frozen=True)
class Counted:
    """Sent to other hosts since the interfaces were made, headers included."""

    bytes_sent: int
    packets_sent: int

    def __sub__(self, earlier: Counted) -> Counted:
        return Counted(self.bytes_sent - earlier.bytes_sent, self.packets_sent - earlier.packets_sent)


def counted(interfaces: Path = INTERFACES) -> Counted:
    """The sum over all interfaces but the loopback."""
    names = [path for path in interfaces.iterdir() if path.name != LOOPBACK]
    return Counted(_sum(names, "tx_bytes"), _sum(names, "tx_packets"))


def _sum(interfaces: list[Path], counter: str) -> int:
    return sum(int((path / "statistics" / counter).read_text()) for path in interfaces)


# Names of a lab's namespaces, and what dead labs have left behind.
#
# A name holds the id and the start time of the process that made it: `shoal-lab-<pid>-<ticks>-<lab>-<host>`. Ids are
# used again, both together are not. A namespace whose owner is gone belongs to a lab that was killed: it can be
# removed.


NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"shoal-lab-(?P<pid>\d+)-(?P<ticks>\d+)-(?P<lab>\d+)-[a-z0-9]+")


def free_prefix(existing: Iterable[str], *, pid: int | None = None) -> str:
    """What the names of a new lab of this process begin with, beside the `existing` names of others."""
    pid = os.getpid() if pid is None else pid
    ticks, taken = start_ticks(pid), list(existing)
    if ticks is None:
        raise EnvironmentFault(f"process {pid} has no start time in /proc: a lab's names hold it; mount /proc")
    names = (f"shoal-lab-{pid}-{ticks}-{number}-" for number in count())
    return next(name for name in names if not any(other.startswith(name) for other in taken))


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def namespaces(folder: Path = NAMESPACES) -> list[str]:
    """The named network namespaces of this machine."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def leftovers(names: Iterable[str]) -> list[str]:
    """Those of `names` that dead labs have left."""
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and start_ticks(int(match["pid"])) != int(match["ticks"]):
            found.append(name)
    return found


def remove_namespaces(names: Iterable[str]) -> None:
    """Removes namespaces, with the links and bridges in them. Processes in them keep theirs until they end.

    One that another process has just removed is gone, too, which is all that is wanted.
    """
    for name in names:
        with contextlib.suppress(EnvironmentFault, subprocess.TimeoutExpired):
            ip([f"netns del {name}"])
    still = set(names) & set(namespaces())
    if still:
        raise EnvironmentFault(f"the namespaces {', '.join(sorted(still))} cannot be removed; try ip netns del NAME")


INTERFACE = "eth0"
STORE_PORT = 29400
_LONGEST_BYTES = 16 << 10


@dataclass(frozen=True)
class Network:
    """A lab that stands. `namespaces[h]` is that of host h."""

    lab: Lab
    namespaces: tuple[str, ...]

    def enter(self, host: int) -> list[str]:
        """What stands before a command to run it on a host."""
        return inside(self.namespaces[host])

    def environ(self, host: int) -> dict[str, str]:
        """What a rank there has to know: where rank 0 is, the interface, and that this is a host of its own."""
        return {
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(STORE_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "SHOAL_HOST": self.lab.hosts[host].name,
        }


def address(host: int) -> str:
    """Of a host, in the lab's own network."""
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def network(lab: Lab) -> Iterator[Network]:
    """The network of `lab`, until the end of the block or of this process, however it ends.

    Leftovers of labs whose remover was killed, too, are removed first.

    Raises:
        EnvironmentFault: this process may not make one, or the kernel cannot.
    """
    require()
    existing = namespaces()
    remove_namespaces(leftovers(existing))
    prefix = free_prefix(existing)
    hosts, switch = tuple(f"{prefix}h{host.number}" for host in lab.hosts), f"{prefix}switch"
    with _removed_in_any_case((*hosts, switch)):
        ip([f"netns add {name}" for name in (switch, *hosts)])
        _join(lab, hosts, switch)
        _shape(lab, hosts, switch)
        yield Network(lab, hosts)


@contextlib.contextmanager
def _removed_in_any_case(names: tuple[str, ...]) -> Iterator[None]:
    """The namespaces `names` are removed by a process of a session of its own, when the pipe to it closes: at the end
    of the block, or with this process. No signal that ends this one, or goes to its terminal, comes in between.

    Raises `EnvironmentFault` where some are still there.
    """
    remove = 'for name; do ip netns del "$name"; done'
    late = "sleep 1"  # what `ip` was about when this process was killed is done by then
    script = f"read -r end && {remove} || {{ {remove}; {late}; {remove}; }}"
    remover = subprocess.Popen(
        ["sh", "-c", script, "sh", *names],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            remover.communicate(b"end\n", timeout=TIMEOUT_S)
        remove_namespaces(set(names) & set(namespaces()))


def _join(lab: Lab, hosts: tuple[str, ...], switch: str) -> None:
    lines = ["link add name bridge type bridge", "link set bridge addrgenmode none up"]
    for number, name in enumerate(hosts):
        port = f"port{number}"
        lines += [
            f"link add name {port} {_long()} type veth peer name {INTERFACE} {_long()} netns {name}",
            f"link set {port} addrgenmode none master bridge up",
        ]
    ip(lines, namespace=switch)
    for a, b in lab.pairs:
        ip([f"link add name to{b} {_long()} type veth peer name to{a} {_long()} netns {hosts[b]}"], namespace=hosts[a])
    for number, name in enumerate(hosts):
        ip(_host_lines(number, _lines_of(lab, number)), namespace=name)


def _host_lines(host: int, others: Mapping[int, float]) -> list[str]:
    lines = [
        "link set lo up",
        f"link set {INTERFACE} addrgenmode none up",
        f"address add {address(host)}/24 dev {INTERFACE}",
    ]
    for other in others:
        lines += [
            f"link set to{other} addrgenmode none up",
            f"route add {address(other)}/32 dev to{other} src {address(host)}",
        ]
    return lines


def _lines_of(lab: Lab, host: int) -> dict[int, float]:
    """The hosts to which `host` has a line of its own, with its rate."""
    return {a if b == host else b: rate for (a, b), rate in lab.pairs.items() if host in (a, b)}


def _shape(lab: Lab, hosts: tuple[str, ...], switch: str) -> None:
    tc([_bucket(lab, f"port{host.number}", host.rate_mbit) for host in lab.hosts], namespace=switch)
    for host, name in zip(lab.hosts, hosts, strict=True):
        lines = {INTERFACE: host.rate_mbit}
        lines |= {f"to{other}": rate for other, rate in _lines_of(lab, host.number).items()}
        tc([_bucket(lab, interface, rate) for interface, rate in lines.items()], namespace=name)


def _bucket(lab: Lab, interface: str, rate_mbit: float) -> str:
    burst = lab.burst_kib << 10
    bits = round(rate_mbit * 1e6)
    return f"qdisc add dev {interface} root tbf rate {bits}bit burst {burst} latency {lab.buffer_ms:g}ms"


def _long() -> str:
    return f"gso_max_size {_LONGEST_BYTES} gro_max_size {_LONGEST_BYTES}"


# Running ranks in a lab: each on its host, all of them supervised like ranks of this machine.
#
# Where the lab's network is "throttle", the hosts are names and the links are kept to by the ranks themselves, who are
# told the rates.


RATES = "SHOAL_LAB_RATES"
"""The variable that tells throttled ranks their hosts and the rates between them."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def run_in_lab(
    lab: Lab,
    command: Sequence[str],
    *,
    run_directory: Path,
    environ: Environ,
    keep_fds: Sequence[int] = (),
    patience: Patience | None = None,
) -> ExitCode:
    """`shoal.launcher.spawn.run_ranks` with the ranks on the hosts of `lab`, which is gone afterwards.

    Call it from the main thread. Raises `EnvironmentFault` where there can be no lab.
    """
    environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **environ}  # addresses of a lab have no names, which torch warns of
    common: dict[str, Any] = {
        "processes": lab.ranks,
        "run_directory": run_directory,
        "environ": environ,
        "keep_fds": keep_fds,
        "patience": patience,
    }
    if lab.network == "throttle":
        say(
            f"lab: {len(lab.hosts)} hosts by name only; ranks keep to the rates between them by themselves, which is "
            'an approximation (lab.network = "kernel" shapes real links)'
        )
        return run_ranks(command, **common, entry_of=lambda rank: throttled_entry(lab, rank))
    with unwinding(), network(lab) as net:
        return run_ranks(command, **common, entry_of=lambda rank: kernel_entry(net, rank))


def kernel_entry(net: Network, rank: int) -> HostEntry:
    """A rank in the namespace of its host."""
    host = net.lab.host_of[rank]
    return HostEntry(net.enter(host), {**_place(net.lab, rank), **net.environ(host)})


def throttled_entry(lab: Lab, rank: int) -> HostEntry:
    """A rank of this machine that takes itself for one of a lab's host, and keeps to its rates."""
    host = lab.hosts[lab.host_of[rank]]
    rates = json.dumps({"hosts": lab.host_of, "bytes_s": lab.bytes_s()})
    return HostEntry((), {**_place(lab, rank), "SHOAL_HOST": host.name, RATES: rates})


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """A signal that would end the process becomes an exception, once, so that what was made is removed."""
    raised: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        if not raised:
            raised.append(number)
            raise SystemExit(128 + number)

    chosen = [number for number in _STOP_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in chosen:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in chosen:
            signal.signal(number, signal.SIG_DFL)


def _place(lab: Lab, rank: int) -> Mapping[str, str]:
    host = lab.hosts[lab.host_of[rank]]
    place = {"LOCAL_RANK": rank - host.ranks.start, "LOCAL_WORLD_SIZE": len(host.ranks), "GROUP_RANK": host.number}
    return {name: str(value) for name, value in place.items()}
