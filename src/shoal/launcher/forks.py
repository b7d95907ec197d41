"""Ranks of a script as forks of the process that has run it up to its call of Shoal.

A rank that is started anew imports torch and runs the script from its beginning, as its launcher did just before. A
fork has done both. It is made where the call stands, goes on from there with the script's own objects, and shares their
memory until it writes to it.

    the launcher                                      a fork
    forked_ranks(n)      gives how to reach them      waits
    begin(...)           environment, descriptors ->  is that rank from here on

A fork must be what a start of its own would be. So none is made where that is in doubt (`why_not`): on other systems
than Linux; where CUDA's driver is loaded, a file or a connection is open (forks share the place in a file), or a
thread runs that a fork would not have; and where the script's text names what differs, such as RANK. Ranks are then
started anew. So they are under `SHOAL_FORK=never`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import io
import json
import os
import re
import signal
import socket
import stat
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from shoal.launcher import allocator, warm
from shoal.launcher.devices import cores
from shoal.launcher.orphans import arm_before_exec

FORK = "SHOAL_FORK"
"""`never`: every rank is started anew."""
FORKS = "SHOAL_FORKS"
"""Of which process they are forks; by rank, the process and the descriptor by which it is reached."""
SEEN_FROM_THE_START = re.compile(
    r"\w*RANK\b|WORLD_SIZE|getpid|getppid|atexit|tempfile|mkdtemp|process_index|is_(?:local_)?main_process|is_last_process"
    r"|init_distributed"
)
"""What a script may do before its call that has another outcome in a rank than in the process that it is a fork of."""
_OPENMP = re.compile(r"/lib(?:gomp|i?omp5?)[-.][^/]*$")
_HEADER_BYTES = 8
_MOST_DESCRIPTORS = 64


class Fork:
    """A fork as its launcher sees it: the part of `subprocess.Popen` that a rank's end needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Its exit code, negative for a signal, once it has ended."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@contextmanager
def forked_ranks(
    count: int, imports: Sequence[str] = (), environ: MutableMapping[str, str] = os.environ
) -> Iterator[Mapping[str, str]]:
    """Forks of this process for the `count` ranks of this host that are started in the block. Gives what to add to
    their environment, for `begin` to find the forks; nothing where a fork would not be what a rank is. `imports` are
    the modules that every rank will need.

    In a fork the block is entered as well, once it has begun as a rank: with that rank's `environ`, streams, session
    and threads.
    """
    variables: dict[str, str] | None = {}
    if count and why_not(environ) is None:
        warm.preload(imports, environ)
        variables = _fork(count, environ)
    try:
        yield variables or {}
    finally:
        _end_waiting(variables or {})


def _fork(count: int, environ: MutableMapping[str, str]) -> dict[str, str] | None:
    """How `count` forks that wait are reached. Nothing where a thread runs that they do not have; None in a fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    _end_threads_of_openmp()
    gc.freeze()  # a fork then copies no page for a collection, nor takes down these objects at its end
    made: list[tuple[int, socket.socket]] = []
    guard = arm_before_exec()
    for _ in range(count):
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are counted below
            pid = os.fork()
        if pid == 0:
            if guard is not None:
                guard()
            for _, end in [*made, (pid, here)]:
                end.close()  # the launcher's: a fork learns from its end that it is not needed
            _wait_to_begin(there, environ)
            return None
        there.close()
        made.append((pid, here))
    gc.unfreeze()
    variables = {FORKS: " ".join([str(os.getpid()), *(f"{pid}:{end.detach()}" for pid, end in made)])}
    if _threads() > 1:  # libraries that know of forks have ended theirs by now
        _end_waiting(variables)
        return {}
    return variables


def begin(
    environ: Mapping[str, str], rank: int, *, stdout: IO[bytes] | int | None, stderr: IO[bytes] | int | None,
    pass_fds: Sequence[int],
) -> Fork | None:  # fmt: skip
    """Has a fork of this process begin as the `rank`-th of this host, with this environment. None where it has none."""
    found = _reached(environ)
    if rank not in found:
        return None
    pid, descriptor = found[rank]
    streams = {1: stdout, 2: stderr}
    given = {number: _descriptor(stream, number) for number, stream in streams.items()} | {fd: fd for fd in pass_fds}
    own = {name: value for name, value in environ.items() if name != FORKS}
    text = json.dumps({"environ": own, "descriptors": list(given)}).encode()
    with socket.socket(fileno=os.dup(descriptor)) as end:
        socket.send_fds(end, [len(text).to_bytes(_HEADER_BYTES)], list(given.values()))
        end.sendall(text)
    return Fork(pid)


def _end_waiting(environ: Mapping[str, str]) -> None:
    """Ends the forks that have not begun, at the end of a run."""
    found = _reached(environ).values()
    for _, descriptor in found:
        os.close(descriptor)
    for pid, _ in found:
        with suppress(ChildProcessError):  # one that has begun was waited for already
            os.waitpid(pid, 0)


def why_not(environ: Mapping[str, str]) -> str | None:
    """What keeps ranks from being forks of this process; None where nothing does but, perhaps, a thread."""
    if environ.get(FORK) == "never":
        return f"{FORK} is never"
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return "forks are made by the main thread, on Linux"
    if any("libcuda.so" in path for path in _mapped()):
        return "CUDA's driver is loaded, which no fork can use"
    if threading.active_count() > 1:
        return "other threads run"
    held = next(_held_open(), None)
    if held is not None:
        return f"{held} is open"
    return next(_named_in_scripts(), None)


def _held_open() -> Iterator[str]:
    """What this process itself has opened and could read or write through. A file that is mapped is read by its
    addresses."""
    mapped = _mapped()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target, kind = os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name)).st_mode
            inherited = os.get_inheritable(int(name)) and stat.S_ISFIFO(kind)
            if int(name) > 2 and not (inherited or stat.S_ISCHR(kind) or target in mapped):
                yield target


def _named_in_scripts() -> Iterator[str]:
    """What the script and the modules beside it name of `SEEN_FROM_THE_START`."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed.add(str(Path(__file__).resolve().parents[1]))
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py") or any(folder in path for folder in ("site-packages", *installed)):
            continue
        with suppress(OSError):
            found = SEEN_FROM_THE_START.search(Path(path).read_text(errors="replace"))
            if found is not None:
                yield f"{path} names {found[0]}"


def _end_threads_of_openmp() -> None:
    """Of each OpenMP that is loaded: a fork would wait for threads that it does not have. They come back with the next
    parallel region. Source: OpenMP 5.0, 3.2.43, `omp_pause_resource_all`.
    """
    for library in _openmp():
        with suppress(AttributeError):
            library.omp_pause_resource_all(2)  # omp_pause_hard


def _openmp() -> list[ctypes.CDLL]:
    return [ctypes.CDLL(path) for path in sorted(_mapped()) if _OPENMP.search(path)]


def _mapped() -> set[str]:
    """The files of which this process has parts in its memory."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if "/" in line}


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _reached(environ: Mapping[str, str]) -> dict[int, tuple[int, int]]:
    """Process and descriptor of each fork of this process, by its place."""
    owner, *forks = environ.get(FORKS, "0").split()
    if owner != str(os.getpid()):
        return {}
    return {place: tuple(map(int, fork.split(":"))) for place, fork in enumerate(forks)}  # type: ignore[misc]


def _descriptor(stream: IO[bytes] | int | None, own: int) -> int:
    if stream is None:
        return own
    return stream if isinstance(stream, int) else stream.fileno()


def _wait_to_begin(end: socket.socket, environ: MutableMapping[str, str]) -> None:
    """Returns when this fork is a rank; the process ends where its launcher needs none, or is interrupted."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    order, received = _order_from(end)
    end.close()
    os.setsid()
    _take(dict(zip(order["descriptors"], received, strict=True)))
    _keep_threads_chosen(order["environ"], environ)
    environ.clear()
    environ.update(order["environ"])
    _unbuffer()
    faulthandler.enable()
    signal.signal(signal.SIGINT, interrupt)


def _order_from(end: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What `begin` has sent. The process ends where its launcher needs no rank."""
    header, received, _, _ = socket.recv_fds(end, _HEADER_BYTES, _MOST_DESCRIPTORS)
    length, text = int.from_bytes(header), b""
    while len(text) < length and (part := end.recv(length - len(text))):
        text += part
    if not text or len(text) < length:
        os._exit(0)
    return json.loads(text), received


def _take(received: Mapping[int, int]) -> None:
    """Puts each received descriptor where it is expected, and closes what is left of the launcher's."""
    first_free = max(*received, *received.values()) + 1
    moved = {wanted: fcntl.fcntl(found, fcntl.F_DUPFD, first_free) for wanted, found in received.items()}
    mapped = _mapped()
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with suppress(OSError):
            if number not in (0, *moved.values()) and os.readlink(f"/proc/self/fd/{name}") not in mapped:
                os.close(number)
    for wanted, found in moved.items():
        os.dup2(found, wanted)
        os.close(found)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _keep_threads_chosen(rank: Mapping[str, str], launcher: Mapping[str, str]) -> None:
    """As many threads and as much memory as the rank's environment says; unless the script has chosen its threads."""
    at_first = int(launcher.get("OMP_NUM_THREADS") or cores())
    if all(library.omp_get_max_threads() == at_first for library in _openmp()):
        warm.set_threads(rank)
    allocator.keep_memory(rank)


def _unbuffer() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else the script's own
            stream.reconfigure(line_buffering=True, write_through=True)
