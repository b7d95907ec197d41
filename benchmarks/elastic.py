"""`python -m benchmarks.elastic`: a run that loses a process now and then, elastic, and restarted from checkpoints.

All sides train the GPT of recipes/stdlib-gpt.toml on two ranks. One is left in peace; the others lose a rank to SIGKILL
every so many seconds. An elastic side may have a spare beside its ranks. The last one is started again by a script, as
torchrun would start its workers, from the newest checkpoint. Two ratios say what failures cost:

    effective       steps that count a second, over those of the side that is left in peace
    at_own_median   steps that count x the side's own median step / seconds from the first step on

The second falls below 1 without any failure, by as much as the mean step is longer than the median.

A last row has what a fingerprint of the state of the first side takes, its weights and two moments, and which share of
the time that is.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report
from shoal.checkpoint.weights import weights_of
from shoal.errors import EnvironmentFault
from shoal.maths.fingerprint import fingerprint
from shoal.observe.events import read_events

RECIPE = Path(__file__).parent.parent / "recipes" / "stdlib-gpt.toml"
NEXT_STEP_S, JOINED_S, RATIO = 2.0, 5.0, 0.95
POLL_S, START_S = 0.05, 120.0
ENDLESS = ("run.steps=1000000", "observe.report=false", "observe.evaluate_every_steps=0", "observe.sample_bytes=0")
FINGERPRINT_EVERY, FINGERPRINT_SHARE = 100, 0.01
ELASTIC = ("elastic.min=1", "elastic.max=2", f"elastic.fingerprint_every_steps={FINGERPRINT_EVERY}")


def elastic(
    seconds: Annotated[int, typer.Option(help="Seconds that each side trains.", min=20)] = 120,
    every: Annotated[float, typer.Option(help="Seconds between two failures.", min=5)] = 60,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """Effective time with failures: elastic with a spare, elastic with a replacement, and restarted.

    Example: python -m benchmarks.elastic --seconds 60 --every 20
    """
    print_report("elastic", measure(seconds, every, save_every), as_json=as_json)


@dataclass
class Side:
    """What one side is called, its keys, and whether the launcher has to be started again after a failure."""

    name: str
    keys: Sequence[str]
    fails: bool = True
    restarts: bool = False
    kills: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)


SIDES = (
    ("undisturbed", (*ELASTIC, "elastic.spares=1"), False, False),
    ("elastic, 1 spare", (*ELASTIC, "elastic.spares=1"), True, False),
    ("elastic, replacements", ELASTIC, True, False),
    ("restarted", ("run.processes=2",), True, True),
)


def measure(seconds: int, every: float, save_every: int) -> Result:
    """A row for each side, and the checks. Raises `EnvironmentFault` where one does not begin to train."""
    rows = []
    imports_s = _imports_s()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        for side, keys, fails, restarts in SIDES:
            keys = (*ENDLESS, f"checkpoint.every_steps={save_every}", *keys)
            rows.append(_train(Side(side, keys, fails, restarts), Path(name), seconds=seconds, every=every))
        fingerprints = _fingerprints(Path(name) / SIDES[0][0], step_s=1e-3 * rows[0]["step_median_ms"])
    for row in rows:
        row["effective"] = round(row["steps_per_s"] / rows[0]["steps_per_s"], 3)
    spare, replaced = rows[1], rows[2]
    gaps = spare["next_step_all_s"] + replaced["next_step_all_s"]
    joined = replaced["joined_after_median_s"]
    return {
        "rows": [*rows, {"side": "imports of a rank alone", "joined_after_median_s": imports_s}, fingerprints],
        "checks": [
            check("next step after kill -9, longest, seconds", max(gaps, default=0.0), NEXT_STEP_S, at_most=True),
            check("a joiner trains after its imports, seconds", joined - imports_s, JOINED_S, at_most=True),
            check("effective time ratio", spare["effective"], RATIO),
            check("fingerprints, share of the time", fingerprints["share"], FINGERPRINT_SHARE, at_most=True),
        ],
    }


def _train(side: Side, folder: Path, *, seconds: int, every: float) -> dict:
    """Trains for so long from the first step on, with failures."""
    directory, draw = folder / side.name.replace(", ", "-").replace(" ", "-"), random.Random(0)
    command = [sys.executable, "-m", "shoal", "train", str(RECIPE), f"run.directory={directory}", *side.keys]
    launcher = _launch(command, directory)
    seen: set[int] = set(_ranks_of(launcher.pid))
    try:
        begin_s = _wait_for_step(directory, launcher)
        next_kill_s = begin_s + every / 2
        while time.time() < begin_s + seconds:
            time.sleep(POLL_S)
            if side.restarts and launcher.poll() is not None:
                launcher = _launch(command, directory)
            ranks = _ranks_of(launcher.pid)
            side.starts += [time.time()] * len(set(ranks) - seen)
            seen |= set(ranks)
            trains = [pid for pid in ranks if _trains(pid)]
            if side.fails and time.time() >= next_kill_s and len(trains) == 2:
                os.kill(victim := draw.choice(trains), signal.SIGKILL)
                side.kills.append(time.time())
                next_kill_s += every
                seen.add(victim)
        end_s = time.time()
    finally:
        launcher.kill()
        launcher.wait()
    return _row(side, directory, begin_s, end_s)


def _row(side: Side, directory: Path, begin_s: float, end_s: float) -> dict:
    times: dict[int, float] = {}
    moments: list[float] = []
    joins: list[float] = []
    replicas = 0.0
    for event in read_events(directory, 0):
        if begin_s <= event.time_s <= end_s and event.get("loss/train") is not None:
            times[event.step] = event.time_s
            moments.append(event.time_s)
        if (now := event.get("membership/replicas")) is not None:
            joins += [event.time_s] if now > replicas and replicas else []
            replicas = now
    gaps = [min((moment for moment in moments if moment > kill), default=end_s) - kill for kill in side.kills]
    ordered = sorted(moments)
    step_s = statistics.median(b - a for a, b in pairwise(ordered))
    counted = max(times) - min(times)
    joined = [
        min(join - start for start in side.starts if start < join)
        for join in joins
        if any(start < join for start in side.starts)
    ]
    return {
        "side": side.name,
        "kills": len(side.kills),
        "steps": counted,
        "taken_again": len(moments) - len(times),
        "step_median_ms": round(1e3 * step_s, 1),
        "next_step_median_s": round(statistics.median(gaps), 2) if gaps else 0.0,
        "next_step_all_s": [round(gap, 2) for gap in gaps],
        "joined_after_median_s": round(statistics.median(joined), 2) if joined else 0.0,
        "steps_per_s": round(counted / (end_s - begin_s), 3),
        "at_own_median": round(counted * step_s / (end_s - begin_s), 3),
    }


def _fingerprints(directory: Path, *, step_s: float) -> dict:
    """What one takes for the state of the newest checkpoint, the best of five, beside so many steps."""
    weights = weights_of(directory)
    state = {f"{part}/{name}": weight for part in ("model", "first", "second") for name, weight in weights.items()}
    taken_s = []
    for _ in range(5):
        begin_s = time.perf_counter()
        fingerprint(state)
        taken_s.append(time.perf_counter() - begin_s)
    share = min(taken_s) / (FINGERPRINT_EVERY * step_s)
    return {"side": "a fingerprint", "milliseconds": round(1e3 * min(taken_s), 2), "share": round(share, 5)}


def _launch(command: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    directory.mkdir(exist_ok=True)
    with (directory / "out.txt").open("ab") as out:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environ, stdout=out, stderr=out)


def _wait_for_step(directory: Path, launcher: subprocess.Popen[bytes]) -> float:
    deadline_s = time.time() + START_S
    while time.time() < deadline_s and launcher.poll() is None:
        with suppress(FileNotFoundError):
            if any(event.step >= 5 for event in read_events(directory, 0)):
                return time.time()
        time.sleep(POLL_S)
    raise EnvironmentFault(f"the run did not begin to train:\n{(directory / 'out.txt').read_text()[-2000:]}")


def _ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    with suppress(OSError):
        return [int(pid) for pid in children.read_text().split()]
    return []


def _trains(pid: int) -> bool:
    """Whether a process has a file of events open: a spare, and one that still loads, have none."""
    with suppress(OSError):
        return any(os.readlink(fd).endswith(".jsonl") for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _imports_s() -> float:
    """Seconds that a rank's imports take."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import shoal.elastic.replica"], check=True)
    return round(time.perf_counter() - begin_s, 2)


if __name__ == "__main__":
    run(elastic)
