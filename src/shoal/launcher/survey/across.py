"""What stands in the way of a run on several hosts: pure judgements on what the hosts told. Each has its repair."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial

import msgspec

from shoal.errors import EnvironmentFault
from shoal.launcher import sockets
from shoal.launcher.doctor import GIB, Finding
from shoal.launcher.environment import Environ, Place, master_from
from shoal.launcher.survey.channel import SocketChannel, Survey, surveyed
from shoal.launcher.survey.messages import Host, HostFacts
from shoal.launcher.survey.network import (
    INTERFACE_VARIABLES,
    MOST_NAMED,
    groups,
    listed,
    network_findings,
    shown_groups,
)
from shoal.launcher.survey.probe import serve
from shoal.units import plural

LITTLE_DISK_BYTES = 10 * GIB


def findings(survey: Survey) -> list[Finding]:
    """What was found, across the hosts first, then on each alone. What is well is one line."""
    across = [
        *silent_findings(survey.silent),
        *network_findings(survey),
        *version_findings(survey.facts),
        *variable_findings(survey.facts),
        *limit_findings(survey.facts),
        *folder_findings(survey.facts),
        *leftover_findings(survey.facts),
    ]
    return [*across, *host_findings(survey.facts)]


def silent_findings(silent: Mapping[str, str]) -> Iterator[Finding]:
    """Who told nothing, and why."""
    for name, why in silent.items():
        repair = (
            f"make 'ssh {name} python -m shoal --help' work without a password (or the like of your --shell); "
            "--python names the interpreter there"
        )
        yield Finding(f"{name}: probe", "problem", why, repair)


def version_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Is the same installed everywhere?"""
    ill = False
    for package in sorted({package for told in facts.values() for package in told.versions}):
        by_version = groups({name: told.versions.get(package) for name, told in facts.items()})
        if len(by_version) == 1:
            continue
        ill = True
        usual, shown = by_version[0][0], shown_groups(by_version)
        odd = [name for version, names in by_version if version != usual for name in names]
        needed = package in ("Python", "torch", "machine")
        if package == "machine":
            repair = "start the run on hosts of one kind, or compare with 'shoal verify' first"
        elif package == "Python" or usual is None:
            repair = f"install the same {package} on {listed(odd if usual else list(facts))}"
        else:
            repair = f"pip install '{package}=={usual}' on {listed(odd)}"
        yield Finding(f"version of {package}", "problem" if needed else "warning", shown, repair)
    by_code = groups({name: told.code for name, told in facts.items()})
    if len(by_code) > 1:
        ill = True
        odd = [name for code, names in by_code[1:] for name in names]
        yield Finding(
            "code of Shoal",
            "problem",
            f"is not the same: {shown_groups(by_code)}",
            f"install on {listed(odd)} what {by_code[0][1][0]} has",
        )
    if facts and not ill:
        told = next(iter(facts.values()))
        yield Finding(
            "versions",
            "ok",
            f"the same on all: Python {told.versions.get('Python')}, torch "
            f"{told.versions.get('torch')}, Shoal's code {told.code}",
        )


def variable_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Do variables differ that change how ranks compute or talk? Interfaces may be called otherwise on each host."""
    for variable in sorted({name for told in facts.values() for name in told.variables} - {*INTERFACE_VARIABLES}):
        by_value = groups({name: told.variables.get(variable) for name, told in facts.items()})
        if len(by_value) > 1:
            yield Finding(
                f"variable {variable}",
                "warning",
                shown_groups(by_value, nothing="not set"),
                "set it alike on every host, or for the whole job (--env of 'shoal submit')",
            )


def limit_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Does a host allow less than the others?"""
    flags = {"open files": "-n", "processes": "-u", "locked memory": "-l"}
    for limit in flags:
        values = {name: told.limits[limit] for name, told in facts.items() if limit in told.limits}
        by_value = groups({name: "unlimited" if value < 0 else f"{value:,}" for name, value in values.items()})
        if len(by_value) > 1:
            least = min(values, key=lambda name: (values[name] < 0, values[name]))
            yield Finding(
                f"limit of {limit}",
                "warning",
                shown_groups(by_value),
                f"raise it on {least}: ulimit {flags[limit]}, /etc/security/limits.conf",
            )


def folder_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Is the folder of the run there, with room?"""
    for name, told in facts.items():
        if told.folder_free_bytes is None:
            yield Finding(
                f"{name}: folder",
                "problem",
                f"{told.folder} is not there",
                "mount the folder that all hosts share, or start where there is one; --folder names it",
            )
        elif told.folder_free_bytes < LITTLE_DISK_BYTES:
            yield Finding(
                f"{name}: disk",
                "warning",
                f"{told.folder_free_bytes / GIB:.1f} GiB free at {told.folder}",
                "delete what nobody needs (old runs' checkpoints), or use another run.directory",
            )


def leftover_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Do processes of other runs hold a host's cores, memory and ports?"""
    for name, told in facts.items():
        if told.leftovers:
            shown = ", ".join(
                f"{one.pid} ({one.command}, {one.age_s / 3600:.1f} h)" for one in told.leftovers[:MOST_NAMED]
            )
            kill = " ".join(str(one.pid) for one in told.leftovers[:MOST_NAMED])
            yield Finding(
                f"{name}: leftovers",
                "warning",
                f"{plural(len(told.leftovers), 'process', 'processes')} of runs: {shown}",
                f"wait for them; where nobody does, on {name}: kill {kill}",
            )


def host_findings(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """What each host found of itself; what is well, counted."""
    well = 0
    for name, told in facts.items():
        for finding in told.findings:
            if finding.status == "ok":
                well += 1
            else:
                yield Finding(f"{name}: {finding.name}", finding.status, finding.found, finding.repair)
    if well:
        yield Finding("each host", "ok", f"{plural(well, 'check')} of single hosts found nothing to repair")


# `shoal doctor --hosts ranks`: the processes that a launcher has started look at their own hosts.
#
#     srun --nodes=4 --ntasks-per-node=1 shoal doctor --hosts ranks
#     torchrun --nnodes=4 --nproc-per-node=1 ... -m shoal doctor --hosts ranks
#
# Rank 0 is the doctor. It listens at MASTER_ADDR and MASTER_PORT, where the first process of each host comes, as the
# ranks of a run would: a host that does not come is the first finding.


COME_S = 60.0
_LOOK_S = 0.2


class _Arrival(msgspec.Struct, frozen=True):
    node_rank: int
    host_name: str


def survey_of_ranks(place: Place, environ: Environ, *, come_s: float = COME_S) -> Survey | None:
    """What the ranks found of their hosts; None on all but rank 0.

    Hosts that do not come within `come_s` seconds are `silent`. Raises `EnvironmentFault` where rank 0 cannot listen,
    and on the others where they cannot reach it.
    """
    address, port = master_from(environ)
    if place.rank != 0:
        if place.local_rank == 0:
            _come(address, port, place, environ, come_s)
        return None
    with sockets.listen_at(address, port, one_host=place.one_host) as listener:
        # Rank 0's own host is looked at by the same way.
        own = "127.0.0.1" if listener.getsockname()[0] in ("0.0.0.0", "::") else listener.getsockname()[0]
        threading.Thread(target=_come, args=(own, port, place, environ, come_s), daemon=True).start()
        count = place.world_size // place.local_world_size
        came = _arrivals(listener, count, come_s)
    names = _names({rank: arrival.host_name for rank, (arrival, _) in came.items()})
    hosts = [Host(names[rank], _address(came[rank][1], address)) for rank in sorted(came)]
    openers = {names[rank]: partial(SocketChannel, connection) for rank, (_, connection) in came.items()}
    found = surveyed(hosts, openers, folder=None, port=0)
    missing = {
        f"host {rank}": f"it did not come to {address}:{port} within {come_s:.0f} s"
        for rank in range(count)
        if rank not in came
    }
    absent = tuple(Host(name, "") for name in missing)
    return Survey((*found.hosts, *absent), found.port, found.facts, {**found.silent, **missing}, found.links)


def _come(address: str, port: int, place: Place, environ: Environ, come_s: float) -> None:
    end_s = time.monotonic() + come_s
    while True:
        try:
            connection = socket.create_connection((address, port), come_s)
            break
        except OSError as error:
            if time.monotonic() > end_s:
                raise EnvironmentFault(
                    f"nothing answers at {address}:{port} ({error.strerror or error}): rank 0 listens there; set "
                    "MASTER_ADDR and MASTER_PORT alike on every host, and allow TCP to that port"
                ) from error
            time.sleep(_LOOK_S)
    with connection:
        connection.settimeout(None)
        connection.sendall(msgspec.json.encode(_Arrival(place.node_rank, socket.gethostname())) + b"\n")
        serve(connection.makefile("rb"), connection.makefile("wb"), environ)


def _arrivals(listener: socket.socket, count: int, come_s: float) -> dict[int, tuple[_Arrival, socket.socket]]:
    """By host, what it said first, and its connection. Whoever says something else is sent away."""
    found: dict[int, tuple[_Arrival, socket.socket]] = {}
    end_s = time.monotonic() + come_s
    while len(found) < count and (left_s := end_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        connection.settimeout(5.0)
        arrival = None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            arrival = msgspec.json.decode(_line(connection), type=_Arrival)
        if arrival is None or arrival.node_rank in found:
            connection.close()
            continue
        connection.settimeout(None)
        found[arrival.node_rank] = (arrival, connection)
    return found


def _line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows the line is the channel's."""
    found = bytearray()
    while not found.endswith(b"\n") and len(found) < 1000 and (byte := connection.recv(1)):
        found += byte
    return bytes(found)


def _names(host_names: dict[int, str]) -> dict[int, str]:
    """Of each host by its number: what it calls itself, with the number where two are called alike."""
    called = list(host_names.values())
    return {rank: name if called.count(name) == 1 else f"{name}-{rank}" for rank, name in sorted(host_names.items())}


def _address(connection: socket.socket, master: str) -> str:
    """Where the peers find the host: from where it came; the doctor's own host, at the master's address."""
    came_from = connection.getpeername()[0]
    return master if ipaddress.ip_address(came_from.partition("%")[0]).is_loopback else came_from
