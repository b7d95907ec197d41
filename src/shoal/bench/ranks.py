"""The ranks of a benchmark. A command starts itself again on every rank, and rank 0 hands its result back.

The process that the user started calls `on_ranks`, which starts `python -m MODULE ARGUMENTS` once a rank. There the
same command finds that it `is_rank`, and calls `run_as_rank` with its measurement. What the measurement returns on
rank 0 goes back through a JSON file in a temporary folder, whose path is in the environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place, place_from
from shoal.units import plural

if TYPE_CHECKING:
    from shoal.launcher.lab.lab_file import Lab

RESULT = "SHOAL_BENCH_RESULT"


def is_rank() -> bool:
    """Whether this process is a rank of a benchmark."""
    return RESULT in os.environ and place_from(os.environ) is not None


def on_ranks(
    command: Sequence[str], *, processes: int, lab: Lab | None = None, mpi: bool = False, part: str = ""
) -> Any:
    """What rank 0 measured.

    Args:
        command: A module and its arguments, as they follow `python -m`.
        processes: The number of ranks, each of one thread.
        lab: The hosts and links on which the ranks run; None: this machine as it is.
        mpi: Whether mpiexec starts the ranks.
        part: What is measured, for the bar that shows how far it has come.

    Raises:
        EnvironmentFault: The ranks failed or cannot be started.
    """
    from shoal.bench.report import shown
    from shoal.files import temporary_folder
    from shoal.launcher.lab.network import run_in_lab
    from shoal.launcher.spawn import run_ranks
    from shoal.launcher.supervision import NOTHING_KEPT

    with temporary_folder() as folder, shown(part or f"measuring on {plural(processes, 'rank')}", folder) as told:
        result = folder / "result.json"
        environ = {**os.environ, **told, "OMP_NUM_THREADS": "1", RESULT: str(result)}
        whole = [sys.executable, "-m", *command]
        if mpi:
            code = _run_by_mpiexec(whole, processes=processes, environ=environ)
        elif lab is not None:
            code = run_in_lab(lab, whole, run_directory=folder, environ=environ, patience=NOTHING_KEPT)
        else:
            code = run_ranks(whole, processes=processes, run_directory=folder, environ=environ, patience=NOTHING_KEPT)
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            raise SystemExit(int(code))  # what it did was said
        if code != 0:
            raise EnvironmentFault(f"the benchmark's ranks ended with exit code {code}; their errors are above")
        return json.loads(result.read_text())


def run_as_rank(measure: Callable[[Place], Any]) -> None:
    """Measures as this rank. The result of rank 0 goes to `on_ranks`; on other ranks `measure` returns None.

    Raises `EnvironmentFault` where this process is not a rank.
    """
    from shoal.assembly.start import as_rank

    place = place_from(os.environ)
    if place is None:
        raise EnvironmentFault("this process is no rank: RANK and WORLD_SIZE are not set; unset SHOAL_BENCH_RESULT")

    def measure_and_save() -> None:
        result = measure(place)
        if result is not None:
            Path(os.environ[RESULT]).write_text(json.dumps(result))

    as_rank(place, measure_and_save, os.environ)


def result_folder() -> Path:
    """The folder that all ranks of a benchmark share. It is removed when the benchmark ends."""
    return Path(os.environ[RESULT]).parent


@contextmanager
def rank_folder() -> Iterator[Path]:
    """A folder of this rank's own, until the end of the block. It lies in the benchmark's, which is removed also where
    this rank is killed; outside of a benchmark, where temporary files go."""
    within = result_folder() if RESULT in os.environ else None
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir=within) as folder:
        yield Path(folder)


def mpiexec() -> str:
    """The path of mpiexec: the one of this environment, else the first in PATH.

    Raises `EnvironmentFault` without mpi4py or without mpiexec.
    """
    from shoal.comm.mpi_world import why_no_mpi

    if importlib.util.find_spec("mpi4py") is None:
        raise EnvironmentFault(f"no ranks over MPI: {why_no_mpi()}")
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise EnvironmentFault(
            "no ranks over MPI: there is no mpiexec to start them; load the cluster's MPI, or pip install mpich"
        )
    return found


def _run_by_mpiexec(command: Sequence[str], *, processes: int, environ: Mapping[str, str]) -> int:
    """The exit code of mpiexec, which ends the other ranks when one fails."""
    from shoal.launcher.children import THROWN_AWAY_S, wait_for
    from shoal.launcher.lab.network import unwinding

    whole = [mpiexec(), "-n", str(processes), *command]
    with unwinding():
        return wait_for(subprocess.Popen(whole, env=environ, stdin=subprocess.DEVNULL), patience_s=THROWN_AWAY_S)
