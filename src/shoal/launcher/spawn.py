"""Start the ranks of one host, watch them, and exit with the code of the first that failed.

Ranks are forks of the launcher where that is safe, so that torch is imported once for all of them (`warm`, `forks`).
It binds the store's port itself, on loopback, and hands the open socket to rank 0: no port is guessed, none is open to
the network. What happens then, and which signal goes when, is in `supervision`; whose failure counts, in
`root_cause`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from shoal.errors import Stopped
from shoal.files import temporary_folder
from shoal.launcher import sockets
from shoal.launcher.devices import cores
from shoal.launcher.environment import STORE_FD, Environ
from shoal.launcher.failure import FAILURE_FOLDER, read_failures
from shoal.launcher.handshake import make_token
from shoal.launcher.orphans import LAUNCHER_PID, LAUNCHER_PIPE
from shoal.launcher.rank_process import HostEntry, RankProcess, rank_environment, start
from shoal.launcher.root_cause import exit_code, failure_report, root_cause
from shoal.launcher.signals import Debounce
from shoal.launcher.store.messages import JOB_TOKEN
from shoal.launcher.supervision import Patience, Supervision, Watch, say

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ExitCode(int):
    """The launcher's exit code, the rank that caused it (None: none did), what it said in one sentence, and whole."""

    rank: int | None
    sentence: str
    text: str

    def __new__(cls, code: int, *, rank: int | None = None, sentence: str = "", text: str = "") -> ExitCode:
        self = super().__new__(cls, code)
        self.rank, self.sentence, self.text = rank, sentence, text
        return self


def run_ranks(
    command: Sequence[str],
    *,
    processes: int,
    run_directory: Path,
    environ: Environ,
    keep_fds: Sequence[int] = (),
    patience: Patience | None = None,
    entry_of: Callable[[int], HostEntry] | None = None,
    first_rank: int = 0,
    world_size: int | None = None,
) -> ExitCode:
    """Run `command` as `processes` ranks, and return the exit code that the launcher should exit with.

    On one host of several, they are `first_rank` and those that follow, of `world_size` on all hosts.

    Call it from the main thread: signals arrive there, and the ranks end when that thread does. `keep_fds` (the run
    directory's lock) are open in every rank; `entry_of` says on which host each rank runs, if not on this one. What
    went wrong is written to standard error. Raises `EnvironmentFault` where ranks cannot be started at all.
    """
    ranks = range(first_rank, first_rank + processes)
    watch = Watch(Supervision(set(ranks), patience or Patience()))
    with temporary_folder() as folder, listening(watch.events), no_survivors(watch.ranks):
        watch.folder = folder
        environ = {**environ, FAILURE_FOLDER: str(folder)}
        if (world_size or processes) == processes and not environ.get(JOB_TOKEN):  # no rank is on another host
            make_token(folder / "token")
            environ[JOB_TOKEN] = str(folder / "token")
        # Held open in this frame, and in no rank: its end of file is how ranks learn that the launcher is gone.
        with pipe() as read_end:
            environ |= {LAUNCHER_PID: str(os.getpid()), LAUNCHER_PIPE: str(read_end)}
            fds = (read_end, *keep_fds)
            _start_all(watch.ranks, command, ranks, run_directory, environ, fds, entry_of or _here)
            watch.until_all_left()
        return conclude(watch, folder, world_size or processes)


def _start_all(
    ranks: list[RankProcess],
    command: Sequence[str],
    numbers: range,
    run_directory: Path,
    environ: Environ,
    keep_fds: Sequence[int],
    entry_of: Callable[[int], HostEntry],
) -> None:
    loopback = {"GLOO_SOCKET_IFNAME": sockets.interface_name()}
    with sockets.listen_on_loopback() as listener:
        port, store_fd = listener.getsockname()[1], listener.fileno()
        for rank in numbers:
            prefix, variables = entry_of(rank)
            # Ranks that are told to meet elsewhere cannot reach this socket: there, rank 0 makes its own.
            meet_here = "MASTER_ADDR" not in variables
            found = {**loopback, **environ} if meet_here else environ
            own = rank_environment(found, rank, processes=len(numbers), port=port, cores=cores()) | dict(variables)
            fds = [*keep_fds]
            if rank == 0 and meet_here:
                own[STORE_FD] = str(store_fd)
                fds.append(store_fd)
            whole = [*prefix, *command]
            ranks.append(start(whole, rank, environ=own, run_directory=run_directory, pass_fds=fds))


def _here(rank: int) -> HostEntry:
    return HostEntry((), {})


def conclude(watch: Watch, folder: Path, world_size: int) -> ExitCode:
    """Say how the run ended, and with which code."""
    ends = root_cause(read_failures(folder), watch.exits)
    stop_signal = watch.supervision.stop_signal
    # A rank that saw another end by our signal may have lost it in a collective: that is no failure.
    if stop_signal is not None and any(end.exit.by_launcher for end in ends) and not any(end.primary for end in ends):
        sentence = f"{stop_signal.name}: stopped at once; {watch.supervision.patience.then}"
        say(sentence)
        return ExitCode(128 + stop_signal, sentence=sentence)
    code = exit_code(watch.exits, ends)
    if ends:
        tails = {rank.rank: rank.log_tail() for rank in watch.ranks if rank.rank == ends[0].exit.rank}
        report = failure_report(ends, watch.exits, world_size=world_size, stopped=watch.stopped, log_tails=tails)
        say(report)
        return ExitCode(code, rank=ends[0].exit.rank, sentence=ends[0].sentence, text=report)
    if code == Stopped.exit_code:
        sentence = "stopped after a good checkpoint; the same command resumes from there"
        say(sentence)
        return ExitCode(code, sentence=sentence)
    return ExitCode(code)


@contextlib.contextmanager
def listening(events: queue.SimpleQueue) -> Iterator[None]:
    """Signals to the launcher become events. One that is ignored (`nohup`) stays so. Several that come at once are one
    request (`signals.Debounce`), by when they come: a busy launcher may be late to hear of each.

    Of two signals at once the kernel may hand both to a thread that waits for a rank. The main thread, in which Python
    runs handlers, then sleeps on; so a thread of their own passes on what Python's C handler writes down at once.
    """
    chosen = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = {number: signal.signal(number, _noted) for number in chosen}
    other_end = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    passing = threading.Thread(target=_pass_on, args=(read_end, frozenset(chosen), events), daemon=True)
    passing.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(other_end)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(write_end)
        passing.join()
        os.close(read_end)


def _noted(number: int, frame: FrameType | None) -> None:
    """Python's part of a handler whose C part has done everything."""


def _pass_on(read_end: int, chosen: frozenset[signal.Signals], events: queue.SimpleQueue) -> None:
    debounce = Debounce()
    while numbers := os.read(read_end, 64):
        now_s = time.monotonic()
        for number in numbers:
            if number in chosen and debounce.request(now_s):
                events.put(signal.Signals(number))


@contextlib.contextmanager
def no_survivors(ranks: list[RankProcess]) -> Iterator[None]:
    """Ends at the end of the block what still runs of `ranks`, as they are then."""
    try:
        yield
    finally:
        for rank in ranks:
            if rank.process.returncode is None:
                rank.reap()


@contextlib.contextmanager
def pipe() -> Iterator[int]:
    """The read end of a pipe whose write end is this process's alone, until the end of the block."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)
