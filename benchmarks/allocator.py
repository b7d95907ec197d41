"""`python -m benchmarks.allocator`: what a rank keeps of the memory that it has freed, and what it gains by that.

The same run under glibc's own thresholds and under those that Shoal gives ranks of machines with less and less memory
(`shoal.launcher.allocator`): the resident memory of the largest rank at its peak, page faults, and the step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import run
from shoal import units
from shoal.bench.options import AsJson, Processes
from shoal.bench.report import Result, check, print_report
from shoal.errors import EnvironmentFault
from shoal.launcher.allocator import thresholds, variables
from shoal.observe.events import read_events, series

SEQUENCE = 128
WARM_UP_STEPS = 10
MOST_SHARE = 0.125
"""Of a machine's memory, which all its ranks together may keep: the promise of `thresholds`."""
MACHINES_GIB = (64, 4, 2, 1)
GLIBC = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
"""The default of one of its settings: as the user has chosen, Shoal adds nothing."""
RUN = """
[run]
name = "allocator"
steps = {steps}
processes = {processes}
[model]
kind = "gpt"
layers = 6
width = 256
heads = 8
feed_forward = "gelu"
feed_forward_width = 1024
[data]
kind = "tokens"
path = "tokens.bin"
[batch]
global_samples = {samples}
sequence = 128
[observe]
report = false
"""


def allocator(
    processes: Processes = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank in a step; a multiple of 128.", min=128)] = 2048,
    steps: Annotated[int, typer.Option(help="Steps behind the first ten.", min=5)] = 30,
    repeats: Annotated[int, typer.Option(help="Turns of all settings.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Peak memory of a rank, page faults and the step: glibc's thresholds beside those of machines of several sizes.

    Example: python -m benchmarks.allocator --repeats 1
    """
    print_report("allocator", measure(processes, tokens=tokens, steps=steps, repeats=repeats), as_json=as_json)


def measure(processes: int, *, tokens: int, steps: int, repeats: int) -> Result:
    """A row for each setting, which take turns, and a check for each machine. Raises `EnvironmentFault`."""
    settings = {"glibc": GLIBC}
    settings |= {f"{size} GiB": variables(thresholds(size << 30, ranks=processes)) for size in MACHINES_GIB}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tofile(folder / "tokens.bin")
        samples = processes * tokens // SEQUENCE
        (folder / "run.toml").write_text(RUN.format(steps=WARM_UP_STEPS + steps, processes=processes, samples=samples))
        for turn in range(repeats):
            for place, (machine, chosen) in enumerate(settings.items()):
                print(f"turn {turn + 1} of {repeats}: thresholds of {machine}", file=sys.stderr, flush=True)
                found[machine].append(_trained(folder, f"run-{turn}-{place}", chosen, steps))
    medians = {
        name: {key: statistics.median(one[key] for one in ones) for key in ones[0]} for name, ones in found.items()
    }
    plain = medians["glibc"]["peak_bytes"]
    rows = [_row(name, medians[name], plain) for name in settings]
    return {"rows": rows, "checks": [_check(size, processes, medians, plain) for size in MACHINES_GIB]}


def _row(name: str, median: Mapping[str, float], plain: float) -> dict[str, Any]:
    return {
        "machine": name,
        "peak_bytes": int(median["peak_bytes"]),
        "more_than_glibc_bytes": int(median["peak_bytes"] - plain),
        "faults_per_step": round(median["faults"]),
        "step_ms": round(1e3 * median["step_s"], 1),
    }


def _check(size_gib: int, processes: int, medians: Mapping[str, Mapping[str, float]], plain: float) -> Any:
    more = processes * (medians[f"{size_gib} GiB"]["peak_bytes"] - plain)
    what = f"what {units.plural(processes, 'rank')} keep of {size_gib} GiB, share"
    return check(what, more / (size_gib << 30), MOST_SHARE, at_most=True)


def _trained(folder: Path, directory: str, chosen: Mapping[str, str], steps: int) -> dict[str, float]:
    """Peak memory of the largest process, page faults of a step of all ranks, the median step of rank 0."""
    _, before = _call(folder, f"{directory}-start", chosen, WARM_UP_STEPS)
    peak, faults = _call(folder, directory, chosen, WARM_UP_STEPS + steps)
    times = series(read_events(folder / directory), "time/step")[1][WARM_UP_STEPS:]
    return {"peak_bytes": peak, "faults": (faults - before) / steps, "step_s": statistics.median(times)}


def _call(folder: Path, directory: str, chosen: Mapping[str, str], steps: int) -> tuple[float, int]:
    """The peak in bytes of the largest process of a run, and minor page faults of all. Raises `EnvironmentFault`."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-m", "shoal", "train", "run.toml", f"run.directory={directory}", f"run.steps={steps}"]
    with open(folder / f"{directory}.txt", "w+b") as said:
        process = subprocess.Popen(command, cwd=folder, env={**plain, **chosen}, stdout=said, stderr=said)
        _, status, used = os.wait4(process.pid, 0)  # with all the processes that it waited for
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            raise EnvironmentFault(f"{' '.join(command)} failed: {said.read()[-500:].decode(errors='replace')}")
    return used.ru_maxrss * 1024.0, used.ru_minflt


if __name__ == "__main__":
    run(allocator)
