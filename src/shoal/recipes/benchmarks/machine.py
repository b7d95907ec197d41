"""What a figure was measured on, and how the ranks of a benchmark are started."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.comm.mpi.world import why_no_mpi
from shoal.errors import EnvironmentFault
from shoal.launch.environment import place_from
from shoal.launch.lab.lab_file import Lab
from shoal.launch.lab.start import run_in_lab, unwinding
from shoal.launch.spawn import run_ranks

RESULT = "SHOAL_BENCH_RESULT"
Result = dict[str, list[dict[str, Any]]]
"""Rows and checks, as the JSON of a benchmark has them."""


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    total = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total) * 1024,
        "python": platform.python_version(),
        "torch": version("torch"),
        "shoal": version("shoal"),
    }


def is_rank() -> bool:
    """Whether this process is a rank of a benchmark."""
    return RESULT in os.environ and place_from(os.environ) is not None


def on_ranks(arguments: Sequence[str], *, processes: int, lab: Lab | None = None, mpi: bool = False) -> Any:
    """Runs `shoal` as ranks of one thread each, here or in a `lab`; `mpi`: mpiexec starts them, as MPI wants it.

    Returns what rank 0 handed to `hand_in`. Raises `EnvironmentFault` where the ranks fail, or cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        result = Path(folder) / "result.json"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", RESULT: str(result)}
        command = [sys.executable, "-m", "shoal", *arguments]
        if mpi:
            code = _run_by_mpiexec(command, processes=processes, environ=environ)
        elif lab is not None:
            code = run_in_lab(lab, command, run_directory=Path(folder), environ=environ)
        else:
            code = run_ranks(command, processes=processes, run_directory=Path(folder), environ=environ)
        if code != 0:
            raise EnvironmentFault(f"the benchmark's ranks ended with exit code {code}; their errors are above")
        return json.loads(result.read_text())


def mpiexec() -> str:
    """The path of mpiexec: that of this environment, else the first of PATH.

    Raises `EnvironmentFault` without one, and without mpi4py.
    """
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
    whole = [mpiexec(), "-n", str(processes), *command]
    with unwinding():
        return subprocess.run(whole, env=environ, stdin=subprocess.DEVNULL, check=False).returncode


def hand_in(result: Any) -> None:
    """What a rank calls with its figures; JSON-able."""
    Path(os.environ[RESULT]).write_text(json.dumps(result))


def result_folder() -> Path:
    """The folder that all ranks of a benchmark share; it goes when the benchmark is over."""
    return Path(os.environ[RESULT]).parent


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
