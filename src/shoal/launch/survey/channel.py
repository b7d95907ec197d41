"""How the doctor reaches a probe: through a remote shell, or over a connection that the host's own process opened."""

from __future__ import annotations

import contextlib
import queue
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Protocol, TypeVar

import msgspec

from shoal.errors import EnvironmentFault, UsageError
from shoal.launch.survey.messages import Host

SHELLS = {
    "ssh": "ssh -o BatchMode=yes -o ConnectTimeout=10",
    "srun": "srun --quiet --nodes=1 --ntasks=1 --overlap --nodelist={host}",
}
PROBE = ("-m", "shoal.launch.survey.probe")
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
