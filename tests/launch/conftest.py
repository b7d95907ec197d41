"""A real launcher in a process of its own, over ranks that are ten lines of Python and import no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
LAUNCHER = """
import os, sys
from pathlib import Path
from shoal.launch.spawn import run_ranks
from shoal.launch.supervision import Patience
script, processes, directory = sys.argv[1:]
sys.exit(run_ranks([sys.executable, script], processes=int(processes), run_directory=Path(directory),
                   environ=os.environ, patience=Patience(failure_s=0.5, saving_s=5.0, terminate_s=0.3)))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from shoal import errors
from shoal.launch.environment import place_from
from shoal.launch.failure import report_failure
from shoal.launch.rank_process import die_with_parent
from shoal.launch.signals import StopRequest
die_with_parent(os.environ)
place = place_from(os.environ)
rank, here = place.rank, Path({directory!r})
def ready():
    (here / "partial-{{}}".format(rank)).write_text(str(os.getpid()))
    (here / "partial-{{}}".format(rank)).rename(here / "ready-{{}}".format(rank))
def until(condition):
    while not condition():
        time.sleep(0.01)
with report_failure(place, Path(os.environ["SHOAL_FAILURE_FOLDER"])):
"""


def _eventually(condition: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether the condition comes true in time."""
    end_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def _is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Launched:
    """A launcher that runs."""

    process: subprocess.Popen[str]
    directory: Path
    processes: int

    def rank_pids(self) -> list[int]:
        """The ranks' pids, once every one of them is ready."""
        files = [self.directory / f"ready-{rank}" for rank in range(self.processes)]
        assert _eventually(lambda: all(file.exists() for file in files)), "the ranks never got ready"
        return [int(file.read_text()) for file in files]

    def survivors(self, pids: list[int]) -> list[int]:
        """Those of `pids` that still run."""
        return [pid for pid in pids if _is_alive(pid)]

    def are_gone(self, pids: list[int], *, within_s: float) -> bool:
        """Whether all of `pids` end in time."""
        return _eventually(lambda: not self.survivors(pids), within_s)

    def end(self) -> tuple[int, str]:
        """The launcher's exit code and what it said."""
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a launcher over ranks that run `body`."""
    started: list[Launched] = []

    def start(body: str, processes: int = 2) -> Launched:
        script = tmp_path / "rank.py"
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        script.write_text(RANK.format(directory=str(tmp_path)) + indented)
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(script), str(processes), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Launched(process, tmp_path, processes))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.send_signal(signal.SIGKILL)
        launched.process.communicate()
