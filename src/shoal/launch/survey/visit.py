"""`shoal doctor --hosts`: opens a channel to every host, and lets the hosts measure each other in rounds.

In a round every host measures one peer and is measured by one, so that no port carries two measurements each way. All
rounds are pings first, which nobody else's load delays then, and rates after them:

    round k:    host i  ->  host (i + k) mod n,    k = 1 ... n - 1

With more than `MOST_ROUNDS` peers, the first and the last half of as many rounds are taken, so that a thousand hosts
take a minute as well: round k and round n - k are the same pairs, one way and the other.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from shoal.errors import EnvironmentFault, UsageError
from shoal.launch.survey.channel import Channel, ShellChannel, remote_command
from shoal.launch.survey.messages import Begin, Host, HostFacts, Measure, SurveyedLink

MASTER_PORT = 29500
BEGIN_S, MEASURE_S = 40.0, 30.0
MOST_ROUNDS = 32
MOST_HOSTS = 4096


@dataclass(frozen=True)
class Survey:
    """What was found. `silent` says why a host told nothing; `links` are by (from, to)."""

    hosts: tuple[Host, ...]
    port: int
    facts: Mapping[str, HostFacts]
    silent: Mapping[str, str]
    links: Mapping[tuple[str, str], SurveyedLink]


def hosts_from(text: str) -> tuple[Host, ...]:
    """Hosts of `A,B` or `A=ADDRESS,B=ADDRESS`; the first is the master. Raises `UsageError`."""
    found = []
    for part in text.split(","):
        name, _, address = (piece.strip() for piece in part.partition("="))
        if not name or name.startswith("-") or any(c.isspace() for c in name + address):
            raise UsageError(f"--hosts {text[:60]!r}: {part.strip()[:40]!r} is no host; write --hosts n1,n2,n3")
        found.append(Host(name, address or name.rpartition("@")[2]))
    names = [host.name for host in found]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise UsageError(f"--hosts names {twice} twice: name each host once")
    if len(found) > MOST_HOSTS:
        raise UsageError(f"--hosts names {len(found):,} hosts: at most {MOST_HOSTS:,} are looked at; name a part")
    return tuple(found)


def survey(hosts: Sequence[Host], *, shell: str, python: str, folder: str | None, port: int = MASTER_PORT) -> Survey:
    """Looks at `hosts` through a remote shell. Raises `UsageError` for a `shell` that is no command."""
    commands = {host.name: remote_command(shell, host.name, python) for host in hosts}
    openers = {host.name: partial(ShellChannel, host, commands[host.name]) for host in hosts}
    return surveyed(hosts, openers, folder=folder, port=port)


def surveyed(
    hosts: Sequence[Host], openers: Mapping[str, Callable[[], Channel]], *, folder: str | None, port: int
) -> Survey:
    """Looks at `hosts` through the channels that `openers` open, by name; closes them in any case."""
    token = secrets.token_hex(16)
    channels: dict[str, Channel] = {}
    facts: dict[str, HostFacts] = {}
    silent: dict[str, str] = {}
    links: dict[tuple[str, str], SurveyedLink] = {}

    closing, closed = threading.Lock(), False

    def begin(host: Host) -> None:
        try:
            channel = openers[host.name]()
            with closing:
                channels[host.name] = channel
                late = closed
            if late:  # interrupted while it was opened
                channel.close()
                return
            question = Begin(host.name, list(hosts), port, token, folder)
            facts[host.name] = channels[host.name].ask(question, HostFacts, within_s=BEGIN_S)
        except EnvironmentFault as fault:
            silent[host.name] = str(fault)

    def measure(pair: tuple[str, str], *, rate: bool) -> None:
        source, target = pair
        try:
            question = Measure(by_name[target], facts[target].port, rate)
            found = channels[source].ask(question, SurveyedLink, within_s=MEASURE_S)
            links[pair] = msgspec.structs.replace(links[pair], bytes_per_s=found.bytes_per_s) if rate else found
        except EnvironmentFault as fault:
            links[pair] = SurveyedLink(obstacle=f"the probe of {source} said nothing more: {fault}")

    by_name = {host.name: host for host in hosts}
    threads = ThreadPoolExecutor(max_workers=len(hosts))
    try:
        _all(threads, begin, hosts)
        all_rounds = rounds([host.name for host in hosts if host.name in facts])
        for pairs in all_rounds:
            _all(threads, partial(measure, rate=False), pairs)
        for pairs in all_rounds:
            open_pairs = [pair for pair in pairs if links[pair].obstacle is None]
            _all(threads, partial(measure, rate=True), open_pairs)
    finally:
        # `threads` may still wait for answers, which end when the channels are closed
        with closing:
            closed, opened = True, list(channels.values())
        with ThreadPoolExecutor(max_workers=len(hosts)) as enders:
            _all(enders, lambda channel: channel.close(), opened)
        threads.shutdown(cancel_futures=True)
    ordered = {host.name: facts[host.name] for host in hosts if host.name in facts}
    ordered_silent = {host.name: silent[host.name] for host in hosts if host.name in silent}
    return Survey(tuple(hosts), port, ordered, ordered_silent, links)


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Who measures whom, round by round."""
    count = len(names)
    shifts = list(range(1, count))
    if len(shifts) > MOST_ROUNDS:
        half = MOST_ROUNDS // 2
        shifts = [*shifts[:half], *shifts[-half:]]
    return [[(names[i], names[(i + shift) % count]) for i in range(count)] for shift in shifts]


def _all(threads: ThreadPoolExecutor, what: Callable[[Any], None], many: Sequence[Any]) -> None:
    """Does it for each of them at once, and waits for all."""
    for future in [threads.submit(what, one) for one in many]:
        future.result()
