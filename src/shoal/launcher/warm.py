"""Commands of Shoal's own as forks of a process that has made their imports already.

Most of what `python -m shoal train` needs to start is importing torch, in each rank again. Where many such commands are
started one after the other, as the trials of a sweep, the process that starts them imports once (`preload`), and each
command, and each rank that it starts, is a fork that runs the same module from its beginning: with its own arguments,
environment, streams, session and signals. What differs from a start of its own: the seed of Python's hashes is shared,
and `ps` shows the command line of the first process.

A fork is made only where this process has imported torch and has not touched a GPU; elsewhere, and for any other
command, a process is started as ever. Nothing of a user's is imported before a fork, so that no state of one trial
reaches another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NoReturn

from shoal.launcher.allocator import keep_memory
from shoal.launcher.devices import cores

WARM = "SHOAL_WARM"
"""Set in commands whose ranks are forks too."""
MODULE = ("-m", "shoal")
_RENEWED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores them from its start on, and `subprocess` sets them back before the exec that does not come."""


def preload(modules: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Imports `modules`; the environment in which commands are forked from here on."""
    for name in modules:
        importlib.import_module(name)
    return {**environ, WARM: "1"}


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[bytes] | int | None,
    stderr: IO[bytes] | int | None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    first: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """A process of `command`, with nothing to read: a fork where that is asked for and safe. `first` is called in it
    before anything else. Raises `OSError` where there can be none.
    """
    preexec = first
    if env.get(WARM) and may_fork(command):
        kept = {0, 1, 2, *pass_fds}

        def become() -> None:
            if first is not None:
                first()
            _become(command[len(MODULE) :], env, kept)

        preexec = become
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=start_new_session,
        preexec_fn=preexec,
    )


def may_fork(command: Sequence[str]) -> bool:
    """Whether `command` is one of Shoal's own, and this process has made the imports and may be forked."""
    torch = sys.modules.get("torch")
    own = command[0] == sys.executable and is_shoals_own(command)
    return own and torch is not None and sys.platform == "linux" and not _uses_accelerator(torch)


def _uses_accelerator(torch: Any) -> bool:
    """Whether this process has used one: a fork of it could not."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and torch.get_device_module(accelerator).is_initialized()


def is_shoals_own(command: Sequence[str]) -> bool:
    """Whether `command` is a Python that runs `shoal`."""
    return tuple(command[1 : 1 + len(MODULE)]) == MODULE


def _become(arguments: Sequence[str], env: Mapping[str, str], kept: set[int]) -> NoReturn:
    """The rest of this process is `python -m shoal ...`; `arguments` begin with the module's name."""
    code = 1
    try:
        _close_all_but(kept)
        _renew_signals()
        os.environ.clear()
        os.environ.update(env)
        _renew_streams()
        _renew_libraries()
        code = _run(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _close_all_but(kept: set[int]) -> None:
    """Also the pipe by which `subprocess` waits for the exec."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _renew_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _RENEWED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _renew_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(line_buffering=unbuffered, write_through=unbuffered)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def _renew_libraries() -> None:
    """Draws, threads and the allocator, as a start with this environment would leave them."""
    import numpy as np

    tempfile.tempdir = None  # its folder may be another now
    random.seed()
    np.random.seed()
    set_threads(os.environ)
    keep_memory(os.environ)


def set_threads(environ: Mapping[str, str]) -> None:
    """As many threads of torch's as a process with this environment starts with."""
    import torch

    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or cores()))


def _run(arguments: Sequence[str]) -> int:
    """The module as Python runs it: its exit code, its traceback."""
    sys.argv = [*arguments]
    sys.modules.pop(f"{arguments[0]}.__main__", None)  # where the command `shoal` has begun with it
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
