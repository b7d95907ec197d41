"""`python -m benchmarks.start`: seconds from a command to its first step, beside a bare script under torchrun."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import bare_script
from benchmarks.command import run
from shoal.bench.options import AsJson, names
from shoal.bench.report import Result, check, merged, print_report
from shoal.errors import EnvironmentFault
from shoal.observe.events import read_events

FIRST_STEP, HELP_S, REFUSAL_S = 1.5, 0.5, 0.5
RUN = """
[run]
name = "start"
steps = 1
[data]
kind = "tokens"
path = "tokens.bin"
[batch]
global_samples = 16
sequence = 128
[observe]
report = false
[model]
"""
MODELS = {
    "gpt": 'kind = "gpt"\nwidth = 128\nlayers = 4\nheads = 4',
    "llama": 'kind = "transformers"\narchitecture = "LlamaForCausalLM"\nconfig = "llama.json"',
}
"""Of Shoal's, and of transformers; the bare script builds the same."""


def start(
    repeats: Annotated[int, typer.Option(help="Starts of each command.", min=1)] = 5,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}, several with commas.")] = "gpt",
    as_json: AsJson = False,
) -> None:
    """Seconds from a command to its first step, beside a bare script under torchrun.

    Example: python -m benchmarks.start --repeats 3 --model llama
    """
    results = [measure(repeats, each) for each in names(model, "--model", MODELS)]
    print_report("start", merged(results), as_json=as_json)


def measure(repeats: int, model: str) -> Result:
    """A row for each command, which are started in turn, and the checks. Raises `EnvironmentFault` where one fails."""
    times: dict[str, list[float]] = {"shoal_train": [], "torchrun": [], "help": [], "refusal": []}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN + MODELS[model])
        (folder / "llama.json").write_text(json.dumps(bare_script.LLAMA))
        np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tofile(folder / "tokens.bin")
        for turn in range(repeats):
            times["torchrun"].append(_torchrun_s(folder / f"done-{turn}", model, folder))
            times["shoal_train"].append(_shoal_train_s(f"run-{turn}", folder))
            times["help"].append(_shoal_s(["--help"], folder, code=0))
            times["refusal"].append(_shoal_s(["train", "run.toml", "run.step=3"], folder, code=2))
    medians = {name: statistics.median(values) for name, values in times.items()}
    first_step = medians["shoal_train"] / medians["torchrun"]
    return {
        "rows": [
            {
                "command": name,
                "model": model,
                "median_s": round(medians[name], 3),
                "all_s": [round(value, 3) for value in values],
            }
            for name, values in times.items()
        ],
        "checks": [
            check(f"first step against torchrun, {model}", first_step, FIRST_STEP, at_most=True),
            check("shoal --help, seconds", medians["help"], HELP_S, at_most=True),
            check("a bad key refused, seconds", medians["refusal"], REFUSAL_S, at_most=True),
        ],
    }


def _torchrun_s(done: Path, model: str, folder: Path) -> float:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    begin_s = time.time()
    _call([*launcher, str(bare_script.__file__), str(done), model], folder, code=0)
    return float(done.read_text()) - begin_s


def _shoal_train_s(directory: str, folder: Path) -> float:
    begin_s = time.time()
    _call([sys.executable, "-m", "shoal", "train", "run.toml", f"run.directory={directory}"], folder, code=0)
    return read_events(folder / directory)[0].time_s - begin_s


def _shoal_s(arguments: Sequence[str], folder: Path, *, code: int) -> float:
    begin_s = time.perf_counter()
    _call([sys.executable, "-m", "shoal", *arguments], folder, code=code)
    return time.perf_counter() - begin_s


def _call(command: Sequence[str], folder: Path, *, code: int) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise EnvironmentFault(f"{' '.join(command)} ended with {done.returncode}, not {code}:\n{done.stderr}")


if __name__ == "__main__":
    run(start)
