"""A real launcher in a process of its own, over ranks that are ten lines of Python and import no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import HANG_S, NEVER_S, wait_until

SOURCE = Path(__file__).parents[2] / "src"
LAUNCHER = """
import os, sys
from pathlib import Path
from shoal.launcher.spawn import run_ranks
from shoal.launcher.supervision import Patience
script, processes, directory, failure_s, start_s = sys.argv[1:]
sys.exit(run_ranks([sys.executable, script], processes=int(processes), run_directory=Path(directory),
                   environ=os.environ, patience=Patience(failure_s=float(failure_s), saving_s=300.0, terminate_s=0.3,
                                                         start_s=float(start_s))))
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from shoal import errors
from shoal.launcher.environment import place_from
from shoal.launcher.failure import report_failure
from shoal.launcher.orphans import die_with_parent
from shoal.launcher.signals import StopRequest
die_with_parent(os.environ)
place = place_from(os.environ)
rank, here = place.rank, Path({directory!r})
def ready():
    (here / "partial-{{}}".format(rank)).write_text(str(os.getpid()))
    (here / "partial-{{}}".format(rank)).rename(here / "ready-{{}}".format(rank))
def until(condition):
    while not condition():
        time.sleep(0.01)
def wait_for_ever():
    while True:
        time.sleep(60)
with report_failure(place, Path(os.environ["SHOAL_FAILURE_FOLDER"])):
"""


def _state(pid: int) -> str:
    """The letter that the kernel gives the state of a process; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    return _state(pid) not in ("", "Z")


@dataclass
class Launched:
    """A launcher that runs."""

    process: subprocess.Popen[bytes]
    directory: Path
    processes: int
    said: Path

    def rank_pids(self) -> list[int]:
        """The ranks' pids, once every one of them is ready."""
        files = [self.directory / f"ready-{rank}" for rank in range(self.processes)]
        wait_until(lambda: all(file.exists() for file in files), self.said.read_text)
        return [int(file.read_text()) for file in files]

    def survivors(self, pids: list[int]) -> list[int]:
        """Those of `pids` that still run."""
        return [pid for pid in pids if _is_alive(pid)]

    def wait_for_ends(self, pids: list[int]) -> None:
        """Until none of `pids` runs."""
        wait_until(lambda: not self.survivors(pids))

    def send_at_once(self, *numbers: signal.Signals) -> None:
        """The launcher finds all of these signals when it goes on, however long this process takes to send them."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: _state(self.process.pid) == "T")
        for number in (*numbers, signal.SIGCONT):
            self.process.send_signal(number)

    def interrupt(self) -> None:
        """A first SIGINT, until the launcher has answered: by then every rank that runs was sent SIGTERM."""
        self.process.send_signal(signal.SIGINT)
        wait_until(lambda: "a second one stops at once\n" in self.said.read_text())

    def end(self) -> tuple[int, str]:
        """The launcher's exit code and what it said."""
        code = self.process.wait(timeout=HANG_S)
        return code, self.said.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a launcher over ranks that run `body`; once one has failed, the others have `failure_s` to end."""
    started: list[Launched] = []

    def start(body: str, processes: int = 2, *, failure_s: float = 0.5, start_s: float = NEVER_S) -> Launched:
        script = tmp_path / "rank.py"
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        script.write_text(RANK.format(directory=str(tmp_path)) + indented)
        limits = [str(failure_s), str(start_s)]
        command = [sys.executable, "-c", LAUNCHER, str(script), str(processes), str(tmp_path), *limits]
        environ = {**os.environ, "PYTHONPATH": str(SOURCE)}
        said = tmp_path / f"said-{len(started)}"
        with said.open("wb") as stderr:
            process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=stderr)
        started.append(Launched(process, tmp_path, processes, said))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.send_signal(signal.SIGKILL)
        launched.process.wait()
