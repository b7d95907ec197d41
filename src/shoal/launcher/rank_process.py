"""One rank as the launcher sees it: its environment, its process, its log and its end.

Each rank leads a session of its own, so that Ctrl-C reaches the launcher alone and the rank's own children can be
ended with it. Rank 0 keeps the terminal; the others write to `logs/rank-0000N.log`.

No rank outlives its launcher: see `orphans`. It is a process of its own command, or a fork (`forks`, `warm`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from shoal.errors import EnvironmentFault
from shoal.launcher import allocator, forks, warm
from shoal.launcher.devices import memory_limit
from shoal.launcher.environment import LOOPBACK, Environ
from shoal.launcher.orphans import arm_before_exec
from shoal.standard_output import kept_descriptor

_TAIL_BYTES = 8192
ALLOC_CONF = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Each is the user's word to PyTorch's allocator for GPUs."""


class HostEntry(NamedTuple):
    """How a rank gets onto its host: what stands before its command, and variables beside those of every rank."""

    prefix: Sequence[str]
    variables: Mapping[str, str]


def rank_environment(environ: Environ, rank: int, *, processes: int, port: int, cores: int) -> dict[str, str]:
    """What a rank finds in its environment, beside what the launcher found in its own."""
    memory = memory_limit()
    kept = allocator.thresholds(memory.total_bytes if memory else None, ranks=processes)
    # Left to itself every rank starts a thread a core, and they fight. Unbuffered: a killed rank's last lines count.
    chosen_by_user = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **({} if allocator.is_chosen(environ) else allocator.variables(kept)),
        **({} if ALLOC_CONF & environ.keys() else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    }
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0}
    return {
        **chosen_by_user,
        **environ,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "SHOAL_LAUNCHER": "1",
    }


def log_path(run_directory: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return run_directory / "logs" / f"rank-{rank:05d}.log"


class Process(Protocol):
    """What a rank's process must do: the part of `subprocess.Popen` that is used of it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | Any: ...

    def wait(self) -> int: ...


@dataclass
class RankProcess:
    """A started rank. Its process stays a zombie until `reap`, so that until then its pid is surely its own."""

    rank: int
    process: Process
    log: Path | None
    log_start: int

    @property
    def pid(self) -> int:
        """The process's id, which is its session's and its group's, too."""
        return self.process.pid

    def wait(self) -> None:
        """Block until the process has ended, without reaping it where the system can (not on macOS)."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self.process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank; SIGKILL also to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def reap(self) -> int:
        """End what the rank left running, and return its exit code (negative for a signal)."""
        with contextlib.suppress(PermissionError):
            self.send(signal.SIGKILL)
        return self.process.wait()

    def is_stopped(self) -> bool:
        """Whether the process is held by SIGSTOP or a debugger; False where the system does not tell."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return False
        return fields[0] in ("T", "t")

    def log_tail(self) -> str:
        """The end of what this run wrote to the rank's log; empty for rank 0, whose output is on the terminal."""
        if self.log is None:
            return ""
        try:
            with self.log.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(self.log_start, size - _TAIL_BYTES))
                return stream.read().decode(errors="replace").strip()
        except OSError:  # the run directory was removed meanwhile
            return ""


def start(
    command: Sequence[str], rank: int, *, environ: Mapping[str, str], run_directory: Path, pass_fds: Sequence[int]
) -> RankProcess:
    """Start one rank. Raises `EnvironmentFault` where its log or its process cannot be made."""
    log = log_path(run_directory, rank) if rank else None
    try:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(_opened(log)) if log else None
            log_start = output.tell() if output else 0
            said = output or kept_descriptor()
            process = forks.begin(environ, rank, stdout=said, stderr=output, pass_fds=pass_fds) or warm.start(
                command,
                env=environ,
                stdout=said,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
                first=arm_before_exec(),
            )
    except OSError as error:
        raise EnvironmentFault(
            f"rank {rank} could not be started ({error}): each rank needs a process and a log in "
            f"{run_directory / 'logs'}; free processes or disk space, or use fewer ranks (run.processes)"
        ) from error
    return RankProcess(rank, process, log, log_start)


def _opened(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")
