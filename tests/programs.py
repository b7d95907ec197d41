"""Programs as processes of their own, begun by the forkserver: what a shell would start, but for the imports.

`shoal ...` and a user's `script.py` run to the letter as from a shell: a launcher, its ranks as its children, their
environment, signals, output and exit codes. Only the interpreter is not started anew: the process is forked where torch
is imported already, and so are the ranks that it starts. Two things differ from a real start: ranks share a hash seed,
and glibc does not read its `MALLOC_` variables. What depends on these, and any other command, is started for real.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tests.forkserver import forkserver
from tests.waiting import HANG_S

FORKED_MODULES = ("shoal", "shoal.launcher.script")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores them from its start on; `subprocess` sets them back before an exec, which no forked child makes."""
_ENVIRON = "environ"


@dataclass
class Program:
    """A started program, with what tests use of `subprocess.Popen`."""

    process: ForkServerProcess
    arguments: Sequence[str]

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises `subprocess.TimeoutExpired`."""
        if not wait([self.process.sentinel], timeout):
            raise subprocess.TimeoutExpired(list(self.arguments), timeout or 0.0)
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def is_forked(arguments: Sequence[str]) -> bool:
    """Whether `python ARGUMENTS` is one of those that are forked: `-m shoal ...` or `script.py ...`."""
    return list(arguments[:2]) in (["-m", module] for module in FORKED_MODULES) or arguments[0].endswith(".py")


def start(arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> Program:
    """Starts `python ARGUMENTS`; one path for both outputs is one file."""
    stdout.touch()  # there to be read as soon as this returns
    stderr.touch()
    process = forkserver().Process(target=_begin, args=(list(arguments), str(cwd), dict(env), str(stdout), str(stderr)))
    process.start()
    return Program(process, arguments)


def run(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str] = os.environ, timeout_s: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` to its end."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        program = start(arguments, cwd=cwd, env=env, stdout=out, stderr=err)
        try:
            code = program.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            program.kill()
            program.wait()
            said = f"{out.read_text()}\n{err.read_text()}"
            raise AssertionError(f"{arguments} did not end in {timeout_s:.0f} s:\n{said}") from error
        return subprocess.CompletedProcess(list(arguments), code, out.read_text(), err.read_text())


def environ_of(pid: int) -> dict[str, str]:
    """The environment with which a process began; that of a forked one is not what the kernel shows."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith(f"/memfd:{_ENVIRON}"):
                return json.loads(fd.read_bytes())
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _begin(arguments: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str) -> None:
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    out = os.open(stdout, flags)
    err = out if stderr == stdout else os.open(stderr, flags)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.chdir(cwd)
    _become(arguments, env)


def _become(arguments: list[str], env: Mapping[str, str]) -> NoReturn:
    """The rest of this process is `python ARGUMENTS`."""
    code = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        os.environ.clear()
        os.environ.update(env)
        os.write(os.memfd_create(_ENVIRON), json.dumps(dict(env)).encode())
        _renew_what_a_start_sets()
        code = _execute(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _renew_what_a_start_sets() -> None:
    """Streams, draws, threads, and how further programs are started."""
    import numpy as np
    import torch

    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(line_buffering=unbuffered, write_through=unbuffered)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    tempfile.tempdir = None  # found by the server, whose TMPDIR may be another
    for finalizer in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # temporary folders of the process that was forked are its own to remove
    random.seed()
    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    subprocess.Popen = _Popen  # type: ignore[misc]


class _Popen(subprocess.Popen):
    """Forks what is one of ours, as `is_forked` says, and starts the rest."""

    def __init__(self, args: Any, **options: Any) -> None:
        arguments = [args] if isinstance(args, str) else [*map(os.fspath, args)]
        if arguments[0] == sys.executable and len(arguments) > 1 and is_forked(arguments[1:]):
            env, kept = options.get("env"), {0, 1, 2, *options.get("pass_fds", ())}

            def become() -> None:
                _close_all_but(kept)
                _become(arguments[1:], dict(os.environ if env is None else env))

            options["preexec_fn"] = (
                become  # called in the fork, with its streams, session and folder set; no exec follows
            )
        super().__init__(args, **options)


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _execute(arguments: list[str]) -> int:
    """The program as Python runs it: its exit code, its traceback, what it has left for the end."""
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0:0] = arguments[1:], [os.getcwd()]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0:0] = arguments, [str(Path(arguments[0]).resolve().parent)]
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = _code_of(error)
    except BaseException as error:
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as ended:
            code = _code_of(ended)
        except BaseException:
            traceback.print_exc()
    atexit._run_exitfuncs()
    return code


def _code_of(end: SystemExit) -> int:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[Any]]) -> Iterator[None]:
    """Kills what still runs of `processes` when the block ends."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
