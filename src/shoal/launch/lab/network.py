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
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.launch.lab import owner
from shoal.launch.lab.iproute import TIMEOUT_S, inside, ip, require, tc
from shoal.launch.lab.lab_file import Lab

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
    existing = owner.namespaces()
    owner.remove(owner.leftovers(existing))
    prefix = owner.prefix(existing)
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
        owner.remove(set(names) & set(owner.namespaces()))


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
