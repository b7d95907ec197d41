"""How the doctor reaches a probe: through a remote shell, or over a connection that the host's own process opened."""

from __future__ import annotations

import contextlib
import queue
import secrets
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Protocol, TypeVar

import msgspec

from shoal.errors import EnvironmentFault, UsageError
from shoal.launcher.survey.messages import Begin, Host, HostFacts, Measure, SurveyedLink

SHELLS = {
    "ssh": "ssh -o BatchMode=yes -o ConnectTimeout=10",
    "srun": "srun --quiet --nodes=1 --ntasks=1 --overlap --nodelist={host}",
}
PROBE = ("-m", "shoal.launcher.survey.probe")
END_S = 3.0
_COMPLAINT_CHARACTERS = 300
Answer = TypeVar("Answer", bound=msgspec.Struct)


class Channel(Protocol):
    """To one probe. One question at a time; whoever asks waits for the answer."""

    def ask(self, question: msgspec.Struct, kind: type[Answer], *, within_s: float) -> Answer:
        """The answer. Raises `EnvironmentFault` where none comes in time, saying what the other end complained of."""
        ...

    def close(self) -> None:
        """Ends the probe."""
        ...


def remote_command(shell: str, host: str, python: str) -> list[str]:
    """The command that starts the probe of `host`. Raises `UsageError` for a `shell` without a program.

    `shell` is a name of `SHELLS` or a command. A command with `{host}` starts the words after it as they are, as
    `docker exec -i {host}` does; one without it gets the host added, and hands its words to a shell there, as ssh does.
    """
    try:
        words = shlex.split(SHELLS.get(shell, shell))
        program = shlex.split(python)
    except ValueError as fault:
        raise UsageError(f"--shell and --python are command lines, and one cannot be read: {fault}") from fault
    if not words or not program:
        raise UsageError("--shell and --python each need a program: write --shell ssh, or 'docker exec -i {host}'")
    if any("{host}" in word for word in words):
        return [*(word.replace("{host}", host) for word in words), *program, *PROBE]
    return [*words, host, *map(shlex.quote, (*program, *PROBE))]


class ShellChannel:
    """A probe that a remote shell has started."""

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self._host = host
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise EnvironmentFault(
                f"{command[0]} could not be started ({error.strerror}): it is the remote shell; install it, or name "
                "another with --shell"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._input = self._process.stdin
        self._answers = _lines_of(self._process.stdout)
        self._complaints = _lines_of(self._process.stderr)

    def ask(self, question: msgspec.Struct, kind: type[Answer], *, within_s: float) -> Answer:
        """See `Channel`. Lines that are no answer, such as a greeting of the host's, are skipped."""
        with contextlib.suppress(OSError):  # it has ended: the answer, which does not come, says so
            self._input.write(msgspec.json.encode(question) + b"\n")
            self._input.flush()
        return _answer(self._answers, kind, within_s=within_s, complaint=self._complaint)

    def close(self) -> None:
        """End of input, which a probe takes for its end; a shell that stays is ended after `END_S`."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _complaint(self) -> str:
        lines = []
        with contextlib.suppress(queue.Empty):
            while (line := self._complaints.get(timeout=0.2)) is not None:
                lines.append(line.decode(errors="replace").strip())
        said = " ".join(line for line in lines if line)[-_COMPLAINT_CHARACTERS:]
        code = self._process.poll()
        return said or ("no word" if code is None else f"exit code {code}, without a word")


class SocketChannel:
    """A probe that came by itself: a rank on another host."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._answers = _lines_of(connection.makefile("rb"))

    def ask(self, question: msgspec.Struct, kind: type[Answer], *, within_s: float) -> Answer:
        """See `Channel`."""
        with contextlib.suppress(OSError):
            self._connection.sendall(msgspec.json.encode(question) + b"\n")
        return _answer(self._answers, kind, within_s=within_s, complaint=lambda: "its connection was lost")

    def close(self) -> None:
        """Ends the connection, and with it the probe."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _answer(
    answers: queue.Queue[bytes | None], kind: type[Answer], *, within_s: float, complaint: Callable[[], str]
) -> Answer:
    while True:
        try:
            line = answers.get(timeout=within_s)
        except queue.Empty:
            raise EnvironmentFault(f"no answer within {within_s:.0f} s ({complaint()})") from None
        if line is None:
            raise EnvironmentFault(complaint())
        if line.startswith(b"{"):
            try:
                return msgspec.json.decode(line, type=kind)
            except msgspec.DecodeError as fault:
                raise EnvironmentFault(f"its answer is of another version of Shoal ({fault})") from fault


def _lines_of(stream: IO[bytes]) -> queue.Queue[bytes | None]:
    """The lines of a stream as they come, and None at its end."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


# `shoal doctor --hosts`: opens a channel to every host, and lets the hosts measure each other in rounds.
#
# In a round every host measures one peer and is measured by one, so that no port carries two measurements each way. All
# rounds are pings first, which nobody else's load delays then, and rates after them:
#
#     round k:    host i  ->  host (i + k) mod n,    k = 1 ... n - 1
#
# With more than `MOST_ROUNDS` peers, the first and the last half of as many rounds are taken, so that a thousand hosts
# take a minute as well: round k and round n - k are the same pairs, one way and the other.


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
    look = _Look(hosts, openers, folder=folder, port=port)
    threads = ThreadPoolExecutor(max_workers=len(hosts))
    try:
        _all(threads, look.begin, hosts)
        all_rounds = rounds([host.name for host in hosts if host.name in look.facts])
        for pairs in all_rounds:
            _all(threads, partial(look.measure, rate=False), pairs)
        for pairs in all_rounds:
            open_pairs = [pair for pair in pairs if look.links[pair].obstacle is None]
            _all(threads, partial(look.measure, rate=True), open_pairs)
    finally:
        look.close()  # `threads` may still wait for answers, which end when the channels are closed
        threads.shutdown(cancel_futures=True)
    return look.survey()


class _Look:
    """What is known of `hosts` so far. Its methods are called from many threads, each for another host or pair."""

    def __init__(
        self, hosts: Sequence[Host], openers: Mapping[str, Callable[[], Channel]], *, folder: str | None, port: int
    ) -> None:
        self._hosts, self._openers = {host.name: host for host in hosts}, openers
        self._token, self._folder, self._port = secrets.token_hex(16), folder, port
        self._channels: dict[str, Channel] = {}
        self._closing, self._closed = threading.Lock(), False
        self._silent: dict[str, str] = {}
        self.facts: dict[str, HostFacts] = {}
        self.links: dict[tuple[str, str], SurveyedLink] = {}

    def begin(self, host: Host) -> None:
        """Starts the probe of `host` and asks it about the host."""
        try:
            channel = self._openers[host.name]()
            with self._closing:
                self._channels[host.name] = channel
                late = self._closed
            if late:  # interrupted while it was opened
                channel.close()
                return
            question = Begin(host.name, list(self._hosts.values()), self._port, self._token, self._folder)
            self.facts[host.name] = channel.ask(question, HostFacts, within_s=BEGIN_S)
        except EnvironmentFault as fault:
            self._silent[host.name] = str(fault)

    def measure(self, pair: tuple[str, str], *, rate: bool) -> None:
        """The link from the first of two hosts that have begun to the second; `rate`: also how fast it is."""
        source, target = pair
        try:
            question = Measure(self._hosts[target], self.facts[target].port, rate)
            found = self._channels[source].ask(question, SurveyedLink, within_s=MEASURE_S)
            if rate:
                found = msgspec.structs.replace(self.links[pair], bytes_per_s=found.bytes_per_s)
            self.links[pair] = found
        except EnvironmentFault as fault:
            self.links[pair] = SurveyedLink(obstacle=f"the probe of {source} said nothing more: {fault}")

    def close(self) -> None:
        """Closes all channels at once, also one that is still being opened."""
        with self._closing:
            self._closed, opened = True, list(self._channels.values())
        with ThreadPoolExecutor(max_workers=len(self._hosts)) as enders:
            _all(enders, lambda channel: channel.close(), opened)

    def survey(self) -> Survey:
        """All of it, in the order of the hosts."""
        facts = {name: self.facts[name] for name in self._hosts if name in self.facts}
        silent = {name: self._silent[name] for name in self._hosts if name in self._silent}
        return Survey(tuple(self._hosts.values()), self._port, facts, silent, self.links)


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
