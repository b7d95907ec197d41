"""The lab file (TOML) -> `Lab`: which hosts a machine plays, how many ranks live on each, how fast their links are.

[lab]
hosts = 2
ranks_per_host = 2
rate_mbit = 100

[[link]]
between = [0, 1]
rate_mbit = 10
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.config.check import Table, checked, says
from shoal.config.load import read
from shoal.errors import ConfigError

MOST_HOSTS, MOST_RANKS = 64, 256
MOST_BUFFER_BYTES = (1 << 31) - 1
MBIT_BYTES = 125_000
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


class LabTable(Table, frozen=True):
    """The hosts, and what their links have in common."""

    hosts: Annotated[int | list[str], says(f"How many hosts (2 to {MOST_HOSTS} make sense, 1 is allowed), or names.")]
    rate_mbit: Annotated[float, says("Rate of each host's link, each way, Mbit/s.", ge=0.1, le=40_000)]
    ranks_per_host: Annotated[int | list[int], says("Ranks on each host, or a number for each of them.")] = 1
    burst_kib: Annotated[
        int, says("What a link lets through at once after a pause, KiB; of kernel networks.", ge=20, le=1 << 16)
    ] = 32
    buffer_ms: Annotated[
        float,
        says(
            "How long a packet may wait in front of a link before it is dropped, ms; of kernel networks.",
            ge=1,
            le=10_000,
        ),
    ] = 100.0
    network: Annotated[
        Literal["kernel", "throttle"],
        says(
            "kernel: namespaces and shaped links, which needs root and iproute2; throttle: inside the ranks' own "
            "processes, approximately, without any right."
        ),
    ] = "kernel"


class LinkTable(Table, frozen=True):
    """An exception: a host whose link has another rate, or two hosts with a line of their own."""

    rate_mbit: Annotated[float, says("Its rate, each way, Mbit/s.", ge=0.1, le=40_000)]
    host: Annotated[int | str | None, says("Number or name of the host whose link it is.")] = None
    between: Annotated[
        list[int | str] | None, says("Two hosts: they are joined directly, beside the links that they share.")
    ] = None


class LabFile(Table, frozen=True):
    """The whole file."""

    lab: LabTable
    link: Annotated[list[LinkTable], says("Exceptions, each written `[[link]]`.")] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class LabHost:
    """One host: its number, its name, its ranks and the rate of its link in Mbit/s."""

    number: int
    name: str
    ranks: range
    rate_mbit: float


@dataclass(frozen=True)
class Lab:
    """Hosts and their links. `pairs` are lines between two hosts, the lower number first, with their rates."""

    hosts: tuple[LabHost, ...]
    pairs: Mapping[tuple[int, int], float]
    burst_kib: int
    buffer_ms: float
    network: Literal["kernel", "throttle"]

    @property
    def ranks(self) -> int:
        """Ranks on all hosts."""
        return self.hosts[-1].ranks.stop

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(host.number for host in self.hosts for _ in host.ranks)

    def rate_mbit(self, source: int, target: int) -> float:
        """From one host to another: their own line's rate, else that of the slower of the two links."""
        pair = (min(source, target), max(source, target))
        return self.pairs.get(pair, min(self.hosts[source].rate_mbit, self.hosts[target].rate_mbit))

    def bytes_s(self) -> tuple[tuple[float, ...], ...]:
        """Bytes a second from each host to each other; the diagonal means nothing."""
        hosts = range(len(self.hosts))
        return tuple(tuple(MBIT_BYTES * self.rate_mbit(a, b) for b in hosts) for a in hosts)


def load_lab(path: Path) -> Lab:
    """The lab of a file. Raises `ConfigError`, one sentence, that names the file and the key."""
    return lab_from(read(path), file=str(path))


def lab_from(data: Mapping[str, Any], *, file: str) -> Lab:
    """The lab of a file's plain dictionaries. Raises `ConfigError`."""
    tables = checked(data, LabFile, file=file)
    names = _names(tables.lab.hosts, file)
    counts = _counts(tables.lab.ranks_per_host, len(names), file)
    own, pairs = _links(tables, names, file)
    _check_rates([tables.lab.rate_mbit, *own.values(), *pairs.values()], tables.lab.buffer_ms, file)
    rates = [own.get(number, tables.lab.rate_mbit) for number in range(len(names))]
    ends = list(accumulate(counts))
    hosts = tuple(LabHost(n, name, range(ends[n] - counts[n], ends[n]), rates[n]) for n, name in enumerate(names))
    return Lab(hosts, pairs, tables.lab.burst_kib, tables.lab.buffer_ms, tables.lab.network)


def _links(tables: LabFile, names: list[str], file: str) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """The rates of hosts' own links, and of lines between two."""
    own: dict[int, float] = {}
    pairs: dict[tuple[int, int], float] = {}
    for index, link in enumerate(tables.link):
        where = f"{file}: link[{index}]"
        if (link.host is None) == (link.between is None):
            raise ConfigError(f"{where}: it names one host or two: give either host = 0 or between = [0, 1]")
        if link.between is None:
            number = _number(link.host, names, f"{where}.host")
            twice, own[number] = number in own, link.rate_mbit
        else:
            pair = _pair(link.between, names, f"{where}.between")
            twice, pairs[pair] = pair in pairs, link.rate_mbit
        if twice:
            raise ConfigError(f"{where}: a second rate for the same link; leave one of them out")
    return own, pairs


def _check_rates(rates: list[float], buffer_ms: float, file: str) -> None:
    """What `tc` cannot count, or would count as something else."""
    fastest = max(rates, key=lambda rate: math.inf if math.isnan(rate) else rate)
    if not math.isfinite(fastest) or not math.isfinite(buffer_ms):
        raise ConfigError(f"{file}: found a rate or a buffer of {fastest:g} Mbit/s, {buffer_ms:g} ms; give numbers")
    if (waiting := fastest * MBIT_BYTES * buffer_ms / 1e3) > MOST_BUFFER_BYTES:
        raise ConfigError(
            f"{file}: lab.buffer_ms: {buffer_ms:g} ms at {fastest:g} Mbit/s are {waiting / 1e9:.1f} GB that wait in "
            "front of a link; the kernel holds 2.1: lower one of the two"
        )


def _names(hosts: int | list[str], file: str) -> list[str]:
    count = hosts if isinstance(hosts, int) else len(hosts)
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError(f"{file}: lab.hosts: found {count}; a lab has 1 to {MOST_HOSTS} hosts")
    names = [f"host-{number}" for number in range(count)] if isinstance(hosts, int) else hosts
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{file}: lab.hosts: found {name!r}; a name has 1 to 32 lower-case letters, digits and dashes"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"{file}: lab.hosts: found {names}; every host has a name of its own")
    return names


def _counts(ranks: int | list[int], hosts: int, file: str) -> list[int]:
    counts = [ranks] * hosts if isinstance(ranks, int) else ranks
    if len(counts) != hosts:
        raise ConfigError(f"{file}: lab.ranks_per_host: found {len(counts)} numbers for {hosts} hosts; give one each")
    if min(counts) < 1 or sum(counts) > MOST_RANKS:
        raise ConfigError(
            f"{file}: lab.ranks_per_host: found {ranks}; every host has a rank, and the lab at most {MOST_RANKS}"
        )
    return counts


def _number(host: int | str | None, names: list[str], where: str) -> int:
    number = names.index(host) if host in names else host
    if not isinstance(number, int) or not 0 <= number < len(names):
        raise ConfigError(f"{where}: found {host!r}; the hosts are 0 to {len(names) - 1}: {', '.join(names)}")
    return number


def _pair(hosts: list[int | str], names: list[str], where: str) -> tuple[int, int]:
    numbers = sorted({_number(host, names, where) for host in hosts})
    if len(numbers) != 2 or len(hosts) != 2:
        raise ConfigError(f"{where}: found {hosts}; a line joins two different hosts, such as [0, 1]")
    return numbers[0], numbers[1]
