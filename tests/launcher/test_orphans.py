"""The two guards against orphans, one at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.launcher.orphans import LAUNCHER_PID, LAUNCHER_PIPE
from tests.waiting import HANG_S, wait_until

SOURCE = Path(__file__).parents[2] / "src"
RANK = """
import os, time
from shoal.launcher.orphans import die_with_parent
die_with_parent(os.environ)
print("armed", flush=True)
time.sleep(3600)
"""


def start(read_end: int, launcher_pid: int) -> subprocess.Popen[bytes]:
    """A rank that believes in this launcher."""
    own = {LAUNCHER_PID: str(launcher_pid), LAUNCHER_PIPE: str(read_end), "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", RANK]
    return subprocess.Popen(command, env={**os.environ, **own}, pass_fds=[read_end], stdout=subprocess.PIPE)


def test_the_end_of_the_pipe_is_the_end_of_the_rank():
    """The parent lives on, so that the kernel's guard stays quiet: the pipe alone must do it."""
    read_end, write_end = os.pipe()
    rank = start(read_end, os.getpid())
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"armed\n"
    assert rank.poll() is None
    os.close(write_end)
    assert rank.wait(timeout=HANG_S) == -signal.SIGKILL
    os.close(read_end)
    rank.stdout.close()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from shoal.launcher.rank_process import start
started = start(["/bin/sh", "-c", "kill -STOP $$; sleep 3600"], 1, environ=os.environ, run_directory=Path(sys.argv[1]),
                pass_fds=())
while not started.is_stopped():
    time.sleep(0.01)
print(started.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_rank_that_is_stopped_before_it_runs_python_ends_with_its_launcher(tmp_path: Path) -> None:
    """As one that is stopped in its imports: it has armed nothing itself, and none of its threads looks."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    try:
        wait_until(lambda: not _runs(pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_a_launcher_that_died_first_is_noticed():
    """A rank whose parent is not its launcher any more ends before it starts, though the pipe is open."""
    read_end, write_end = os.pipe()
    rank = start(read_end, launcher_pid=os.getppid())
    assert rank.communicate(timeout=HANG_S) == (b"", None)
    assert rank.returncode == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)
