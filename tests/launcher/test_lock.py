"""The run directory's lock, between real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault, InUse
from shoal.launcher import lock
from shoal.launcher.lock import RunLock

SOURCE = Path(__file__).parents[2] / "src"
HOLDER = """
import sys, time
from pathlib import Path
from shoal.launcher.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(3600)
"""


def test_a_second_taker_is_told_who_holds_it(tmp_path):
    """The refusal names pid, host and the repair; once the holder is killed -9 the lock is free."""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], env=environ, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(InUse, match=rf"process {holder.pid} on {socket.gethostname()}.*run\.directory"):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.communicate()
    with RunLock(tmp_path):
        pass


def test_the_lock_lives_as_long_as_a_rank_that_inherited_it(tmp_path):
    """The launcher lets go, a rank still holds; the rank is gone, the lock is free."""
    taken = RunLock(tmp_path)
    taken.acquire()
    rank = subprocess.Popen(["sleep", "infinity"], pass_fds=[taken.fd])
    taken.release()
    with pytest.raises(InUse):
        RunLock(tmp_path).acquire()
    rank.kill()
    rank.wait()
    with RunLock(tmp_path):
        pass


LAUNCHER = """
import subprocess, sys
from pathlib import Path
from shoal.launcher.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print(subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[lock.fd], stdout=subprocess.DEVNULL).pid, flush=True)
"""


@pytest.mark.parametrize("outlives_s", ["0.5", "infinity"])
def test_ranks_that_outlive_their_launcher_are_waited_for(tmp_path, monkeypatch, outlives_s: str):
    """For a moment: the kernel ends them soon. Those that stay are said to be ranks of a launcher that is gone."""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", LAUNCHER, tmp_path, outlives_s]
    launcher = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    rank = int(launcher.communicate()[0])
    if outlives_s == "0.5":
        with RunLock(tmp_path):
            return
    monkeypatch.setattr(lock, "ENDING_S", 0.2)
    try:
        with pytest.raises(InUse, match=rf"in use by ranks that process {launcher.pid} started, which has ended"):
            RunLock(tmp_path).acquire()
    finally:
        os.kill(rank, signal.SIGKILL)


def test_a_child_that_is_not_handed_the_lock_does_not_hold_it(tmp_path):
    """Only ranks inherit it: any other child of the launcher may outlive the run."""
    with RunLock(tmp_path):
        other = subprocess.Popen(["sleep", "infinity"])
    with RunLock(tmp_path):
        pass
    other.kill()
    other.wait()


def test_a_file_left_behind_is_no_obstacle(tmp_path):
    """Neither an old holder's text nor rubbish in the file stands in the way."""
    (tmp_path / ".lock").write_bytes(b"\xff\x00 not json")
    with RunLock(tmp_path), pytest.raises(InUse):
        RunLock(tmp_path).acquire()


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path):
    """Or of a folder above it; with the repair."""
    (tmp_path / "file").touch()
    with pytest.raises(
        EnvironmentFault, match=r"/file is a file, and should be the run directory: move it away, or set"
    ):
        RunLock(tmp_path / "file").acquire()
    with pytest.raises(
        EnvironmentFault, match=r"/file is a file, and should be a folder of the run directory \S+/file/run"
    ):
        RunLock(tmp_path / "file" / "run").acquire()


def test_a_directory_that_cannot_be_written_is_a_fault():
    """The words of the system, and the repair."""
    with pytest.raises(
        EnvironmentFault, match=r"directory /proc/none cannot be written \(.+\): make it writable, or set"
    ):
        RunLock(Path("/proc/none")).acquire()


def test_a_lock_that_was_not_taken_has_no_descriptor(tmp_path):
    """Nobody hands on a lock that is not held."""
    with pytest.raises(RuntimeError, match="not locked"):
        _ = RunLock(tmp_path).fd
