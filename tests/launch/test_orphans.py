"""The two guards against orphans, one at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from shoal.launch.rank_process import LAUNCHER_PID, LAUNCHER_PIPE
from tests.waiting import HANG_S

SOURCE = Path(__file__).parents[2] / "src"
RANK = """
import os, time
from shoal.launch.rank_process import die_with_parent
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


def test_a_launcher_that_died_first_is_noticed():
    """A rank whose parent is not its launcher any more ends before it starts, though the pipe is open."""
    read_end, write_end = os.pipe()
    rank = start(read_end, launcher_pid=os.getppid())
    assert rank.communicate(timeout=HANG_S) == (b"", None)
    assert rank.returncode == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)
