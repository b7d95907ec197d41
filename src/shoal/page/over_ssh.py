"""The page of a run on another host: `shoal watch` there, on loopback, and its port forwarded here by ssh.

    HOST:RUN_DIR     a run directory, relative to the home folder there
    HOST:            the newest run in runs/ of the home folder

One ssh runs the page until its input ends, which it does when this process does; a second one forwards a port of
loopback here to the port of loopback there. Nothing listens outside loopback on either host.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import urlsplit

from shoal.errors import EnvironmentFault, UsageError
from shoal.page.server import listen

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
START_S = 120.0
_LOOK_S = 0.05
_COMPLAINT_CHARACTERS = 300
_REMOTE = re.compile(r"(?P<host>(?:[\w.-]+@)?(?:[\w.-]+|\[[0-9A-Fa-f:]+\])):(?P<directory>.*)")

Found = TypeVar("Found")


@dataclass(frozen=True)
class Remote:
    """A run on another host; an empty `directory` is the newest one there."""

    host: str
    directory: str


def remote_of(text: str) -> Remote | None:
    """What "HOST:RUN_DIR" names; None for a path of this machine."""
    if Path(text).exists():
        return None
    found = _REMOTE.fullmatch(text)
    return None if found is None else Remote(found["host"].strip("[]"), found["directory"])


@contextlib.contextmanager
def forwarded(remote: Remote, *, ssh: str = SSH, python: str = "python3", port: int = 0) -> Iterator[str]:
    """The page's address here, token included, for as long as the block runs; `port` 0: any that is free.

    Raises `EnvironmentFault` where ssh is refused, or starts no page there, with its own words.
    """
    words = _words(ssh)
    local = _free_port(port)
    directory = ["--newest"] if not remote.directory else ["--", remote.directory]
    there = shlex.join([*_words(python), "-m", "shoal", "watch", "--with-input", *directory])
    with _running([*words, "-T", remote.host, there], remote) as page:
        address = urlsplit(page.first_line("starts no page there"))
        ends = f"127.0.0.1:{local}:127.0.0.1:{address.port}"
        with _running([*words, "-N", "-o", "ExitOnForwardFailure=yes", "-L", ends, remote.host], remote) as tunnel:
            tunnel.until_open(local)
            yield f"http://127.0.0.1:{local}/?{address.query}"


class _Ssh:
    """One ssh, whose complaints are kept."""

    def __init__(self, process: subprocess.Popen[str], remote: Remote) -> None:
        self._process, self._remote = process, remote
        self._complaints: list[str] = []
        self._lines: list[str] = []
        self._threads = [
            threading.Thread(target=_read, args=(stream, into), daemon=True)
            for stream, into in ((process.stdout, self._lines), (process.stderr, self._complaints))
        ]
        for thread in self._threads:
            thread.start()

    def first_line(self, otherwise: str) -> str:
        """The address that it prints."""
        return self._until(lambda: next((line for line in self._lines if line.startswith("http://")), None), otherwise)

    def until_open(self, port: int) -> None:
        """Until its end of the tunnel takes connections."""
        self._until(lambda: _answers(port) or None, "forwards no port")

    def _until(self, found: Callable[[], Found | None], otherwise: str) -> Found:
        end_s = time.monotonic() + START_S
        while (value := found()) is None:
            if self._process.poll() is not None or time.monotonic() > end_s:
                for thread in self._threads:
                    thread.join(1.0)
                if (value := found()) is not None:
                    break
                said = " ".join(" ".join(self._complaints).split())[-_COMPLAINT_CHARACTERS:] or "no word"
                raise EnvironmentFault(
                    f"ssh to {self._remote.host} {otherwise} ({said}): see that 'ssh {self._remote.host} true' works, "
                    "and that Shoal is there for the interpreter that --python names, with the extra 'page'"
                )
            time.sleep(_LOOK_S)
        return value


@contextlib.contextmanager
def _running(command: Sequence[str], remote: Remote) -> Iterator[_Ssh]:
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise EnvironmentFault(f"{command[0]} could not be started ({error.strerror}): install OpenSSH") from error
    try:
        yield _Ssh(process, remote)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.terminate()
        process.wait()


def _read(stream: IO[str], into: list[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        into.extend(iter(stream.readline, ""))


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def _free_port(port: int) -> int:
    with listen("127.0.0.1", port) as listener:
        return listener.getsockname()[1]


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as fault:
        raise UsageError(f"{command!r} is no command line ({fault}): quote its words as a shell would") from fault
    if not words:
        raise UsageError("--ssh and --python each need a program: leave them out for ssh and python3")
    return words


def newest_run(folder: Path = Path("runs")) -> Path:
    """The run in `folder` whose run file was written last. Raises `UsageError` where there is none."""
    found = sorted(folder.glob("*/run.toml"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UsageError(f"{folder.absolute()} holds no run: name its directory, HOST:RUN_DIR")
    return found[-1].parent
