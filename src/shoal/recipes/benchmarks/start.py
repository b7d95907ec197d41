"""`shoal bench start`: seconds from a command to its first step, beside a bare script under torchrun."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import EnvironmentFault
from shoal.observe.events import read_events
from shoal.recipes.benchmarks import bare_script
from shoal.recipes.benchmarks.paired import check

FIRST_STEP, HELP_S, REFUSAL_S = 1.5, 0.5, 0.5
RUN = """
[run]
name = "start"
steps = 1
[model]
kind = "gpt"
width = 128
layers = 4
heads = 4
[data]
kind = "tokens"
path = "tokens.bin"
[batch]
global_samples = 16
sequence = 128
[observe]
report = false
"""


def measure(repeats: int) -> dict[str, Any]:
    """Every command in turn, `repeats` times; a row a command and the promised figures."""
    times: dict[str, list[float]] = {"shoal_train": [], "torchrun": [], "help": [], "refusal": []}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        place = Path(folder)
        (place / "run.toml").write_text(RUN)
        np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tofile(place / "tokens.bin")
        for turn in range(repeats):
            times["torchrun"].append(_torchrun(place / f"done-{turn}", place))
            times["shoal_train"].append(_shoal_train(f"run-{turn}", place))
            times["help"].append(_spent(["--help"], place, code=0))
            times["refusal"].append(_spent(["train", "run.toml", "run.step=3"], place, code=2))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [{"command": n, "median_s": round(medians[n], 3), "all_s": [round(v, 3) for v in times[n]]} for n in times]
    return {
        "rows": rows,
        "checks": [
            check(
                "first step against torchrun", medians["shoal_train"] / medians["torchrun"], FIRST_STEP, at_most=True
            ),
            check("shoal --help, seconds", medians["help"], HELP_S, at_most=True),
            check("a bad key refused, seconds", medians["refusal"], REFUSAL_S, at_most=True),
        ],
    }


def _torchrun(done: Path, folder: Path) -> float:
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begin_s = time.time()
    _call([*script, str(bare_script.__file__), str(done)], folder, code=0)
    return float(done.read_text()) - begin_s


def _shoal_train(directory: str, folder: Path) -> float:
    begin_s = time.time()
    _call([sys.executable, "-m", "shoal", "train", "run.toml", f"run.directory={directory}"], folder, code=0)
    return read_events(folder / directory)[0].time_s - begin_s


def _spent(arguments: Sequence[str], folder: Path, *, code: int) -> float:
    begin_s = time.perf_counter()
    _call([sys.executable, "-m", "shoal", *arguments], folder, code=code)
    return time.perf_counter() - begin_s


def _call(command: Sequence[str], folder: Path, *, code: int) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise EnvironmentFault(f"{' '.join(command)} ended with {done.returncode}, not {code}:\n{done.stderr}")
