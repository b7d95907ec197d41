"""`python -m benchmarks.random_faults`: kill -9 and SIGSTOP at random times, elastic beside torchrun with restarts.

Each seed draws a schedule: times, signals, and which of the ranks. It strikes two sides, one after the other, which
train the job of `random_faults_job`:

    elastic      `shoal train` with `[elastic]`, max = `--replicas`, min = 1 (2 with a strategy that needs others)
    restarted    DDP under `torchrun --max-restarts`, with a save every so many steps (`random_faults_script`)

Where no rank is there at a fault's time, it waits for one. What counts is read from the job's own record, alike on both
sides. A step counts when the forward of the next one has seen its weights, and of a step that was taken again, the last
time counts. The samples of the steps that count are compared with the order of the data:

    effective       steps that count a second, over those of the same side left in peace
    taken_again     steps that were begun and do not count
    samples_twice, samples_never    of the steps that count
    hangs           faults after which no step began within `BOUND_S`, and ends that took longer than `END_S`
    orphans         processes that are left `GRACE_S` after their launcher
    ended_unstruck  ranks that ended though nothing struck them: torchrun ends all, an elastic run none

`--alone` takes the elastic side only, and no steps in peace: many short schedules in little time. `--forked` starts its
processes from one that has made their imports, which take a processor longer than all else (`tests/programs.py` says
what differs). `--sync` names another strategy; its replicas may be `APART` steps apart, so the last steps are not
counted.

The exit code is 1 where the elastic side lost or repeated a sample, hung, left a process or failed.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmarks.command import run
from benchmarks.random_faults_job import BATCH, RECORD, SAMPLES, STEP, Used, read_record
from benchmarks.struck_processes import MARK, POLL_S, end_orphans, ranks_of, state_of
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report
from shoal.data.order import Order
from shoal.errors import EnvironmentFault, Stopped
from tests.programs import Program, is_forked, start

Launcher = subprocess.Popen | Program

ELASTIC, RESTARTED = "elastic", "restarted"
SILENCE_S, ACCEPT_S, REPLACEMENT_S = 10.0, 20.0, 20.0
"""A rank in silence is lost, on both sides; a replica that does not answer is; a process starts and joins."""
BOUND_S = SILENCE_S + ACCEPT_S + REPLACEMENT_S
START_S, END_S = 120.0, 60.0
FIRST_STEP = 3
"""From this step on time is taken."""
NOTICE_S = 1.0
"""Ranks that run may still begin a step after another was struck."""
CALM_S = 3.0
"""Nothing is struck in the last seconds."""
EVERY_STEPS = 4
"""From one agreement to the next, of a strategy whose replicas take steps of their own."""
APART = 2 * EVERY_STEPS
"""The most that its replicas may be apart, in steps."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
COUNTED = ("steps", "effective", "taken_again", "samples_twice", "samples_never", "longest_gap_s", "hangs", "orphans")

RUN = f"""
[run]
name = "random-faults"
steps = 1000000
[model]
kind = "python"
build = "benchmarks.random_faults_job:model"
[data]
kind = "python"
build = "benchmarks.random_faults_job:data"
[batch]
global_samples = {BATCH}
[optimizer]
kind = "adamw"
lr = 0.001
[observe]
report = false
sample_bytes = 0
[elastic]
silence_s = {SILENCE_S}
accept_s = {ACCEPT_S}
wait_s = 120
"""


@dataclass(frozen=True)
class Setting:
    """What is trained: on so many ranks, with the strategy `sync`, for so many seconds."""

    seconds: int
    save_every: int
    replicas: int = 2
    sync: str = "allreduce"
    forked: bool = False
    step_s: float = 0.02

    @property
    def apart(self) -> int:
        """The most steps that replicas may be apart."""
        return 0 if self.sync == "allreduce" else APART


class Fault(NamedTuple):
    """`signal` strikes at `at_s`, in seconds from the first step on; `share` in [0, 1) says which rank."""

    at_s: float
    signal: signal.Signals
    share: float


@dataclass
class Trial:
    """One side under one schedule. `begin_s` and `end_s` bound what counts, in Unix time; `struck` are the times,
    processes and signals of the faults; `seen` the processes of all ranks that there were.
    """

    side: str
    record: list[Used] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0
    struck: list[tuple[float, int, signal.Signals]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    ended_unstruck: int = 0
    hangs: int = 0
    orphans: int = 0
    exit_code: int | None = None
    said: str = ""


def random_faults(
    seeds: Annotated[int, typer.Option(help="How many schedules.", min=1)] = 6,
    seconds: Annotated[int, typer.Option(help="Seconds that each side trains.", min=10)] = 50,
    every: Annotated[float, typer.Option(help="Mean seconds between two faults.", min=1)] = 12,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.", min=1)] = 100,
    first_seed: Annotated[int, typer.Option(help="Seed of the first schedule.", min=0)] = 0,
    replicas: Annotated[int, typer.Option(help="Ranks of each side.", min=2, max=4)] = 2,
    sync: Annotated[
        str, typer.Option(help="sync.kind of the elastic side: allreduce, local, gossip, ...")
    ] = "allreduce",
    alone: Annotated[bool, typer.Option("--alone", help="The elastic side only, and not in peace.")] = False,
    forked: Annotated[
        bool, typer.Option("--forked", help="Fork the elastic side's processes where torch is imported already.")
    ] = False,
    step_s: Annotated[float, typer.Option(help="Seconds that a step waits in the place of a device.", min=0.0)] = 0.02,
    as_json: AsJson = False,
) -> None:
    """Random faults, the same on an elastic run and on one that torchrun restarts: steps, samples, hangs, orphans.

    Example: python -m benchmarks.random_faults --seeds 3 --seconds 40
    """
    setting = Setting(seconds, save_every, replicas, sync, forked, step_s)
    result = measure(range(first_seed, first_seed + seeds), setting, every=every, alone=alone)
    print_report("random_faults", result, as_json=as_json)
    if not all(one["holds"] for one in result["checks"]):
        raise typer.Exit(1)


def measure(seeds: Sequence[int], setting: Setting, *, every: float, alone: bool = False) -> Result:
    """A row for each seed and side, one for the medians of each side, and the checks of the elastic one."""
    sides = (ELASTIC,) if alone else (ELASTIC, RESTARTED)
    calm = {} if alone else {side: row_of(_train(side, (), setting), "none", None) for side in sides}
    rows = list(calm.values())
    for seed in seeds:
        faults = schedule(seed, setting.seconds, every)
        for side in sides:
            print(f"seed {seed}, {side}, {len(faults)} faults", file=sys.stderr, flush=True)
            trial = _train(side, faults, setting)
            apart = setting.apart if side == ELASTIC else 0
            peace = calm[side]["steps"] / setting.seconds if side in calm else None
            rows.append(row_of(trial, str(seed), peace, apart=apart))
            if side == ELASTIC and (trial.ended_unstruck or not all(one["holds"] for one in checks_of(rows[-1:]))):
                print(f"seed {seed}: {rows[-1]}\n{_told(trial)}", file=sys.stderr, flush=True)
    return {"rows": [*rows, *medians(rows)], "checks": checks_of(rows)}


def schedule(seed: int, seconds: float, every: float) -> list[Fault]:
    """The faults of a seed: gaps between 0.3 and 1.7 times `every` seconds, so that two may strike in one recovery."""
    draw, faults = random.Random(seed), []
    at_s = every * draw.uniform(0.1, 1.0)
    while at_s < seconds - CALM_S:
        faults.append(Fault(at_s, draw.choice(SIGNALS), draw.random()))
        at_s += every * draw.uniform(0.3, 1.7)
    return faults


def checks_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What an elastic run promises, over all its rows."""
    own = [row for row in rows if row["side"] == ELASTIC]
    samples = sum(row["samples_twice"] + row["samples_never"] for row in own)
    failed = sum(row["exit_code"] != Stopped.exit_code for row in own)
    return [
        check("elastic: samples used twice or never", samples, 0, at_most=True),
        check("elastic: hangs", sum(row["hangs"] for row in own), 0, at_most=True),
        check("elastic: orphans", sum(row["orphans"] for row in own), 0, at_most=True),
        check(f"elastic: runs that did not end with {Stopped.exit_code} when asked to", failed, 0, at_most=True),
    ]


def row_of(trial: Trial, seed: str, calm_steps_per_s: float | None, *, apart: int = 0) -> dict[str, Any]:
    """The figures of a trial, whose replicas may be so many steps `apart`; `effective` is None where no side was left
    in peace.
    """
    counted = [used for used in trial.record if used.time_s <= trial.end_s]
    last = max(counted[-1].step - 1 - apart, 0)
    twice, never = misused(counted, last, expected_ids(trial.side, last))
    before = max((used.step for used in counted if used.time_s <= trial.begin_s), default=FIRST_STEP)
    steps = last - before
    begun = Counter((used.step, generation) for generation, used in _attempts(counted))
    moments = [trial.begin_s, *(used.time_s for used in counted if used.time_s > trial.begin_s), trial.end_s]
    seconds = trial.end_s - trial.begin_s
    return {
        "side": trial.side,
        "seed": seed,
        "kills": sum(number == signal.SIGKILL for _, _, number in trial.struck),
        "stops": sum(number == signal.SIGSTOP for _, _, number in trial.struck),
        "steps": steps,
        "effective": None if calm_steps_per_s is None else round(steps / seconds / calm_steps_per_s, 3),
        "taken_again": len(begun) - len({step for step, _ in begun}),
        "samples_twice": twice,
        "samples_never": never,
        "longest_gap_s": round(max(b - a for a, b in pairwise(moments)), 2),
        "hangs": trial.hangs,
        "orphans": trial.orphans,
        "ended_unstruck": trial.ended_unstruck,
        "exit_code": trial.exit_code,
    }


def _attempts(record: Sequence[Used]) -> list[tuple[int, Used]]:
    """Each line with the number of the attempt at its step: the next one begins when its samples exceed a batch or one
    of them comes again."""
    number: Counter[int] = Counter()
    seen: dict[int, set[int]] = {}
    found = []
    for used in record:
        ids = seen.setdefault(used.step, set())
        if ids & set(used.ids) or len(ids) + len(used.ids) > BATCH:
            number[used.step] += 1
            ids.clear()
        ids |= set(used.ids)
        found.append((number[used.step], used))
    return found


def misused(record: Sequence[Used], last: int, expected: Sequence[int]) -> tuple[int, int]:
    """How many uses of samples were one too many, and how many samples were never used, in the steps that count: 1 to
    `last`, whose samples are `expected`. Of each step the last lines count that make a batch.
    """
    by_step: dict[int, list[int]] = {}
    for used in reversed(record):
        ids = by_step.setdefault(used.step, [])
        if len(ids) < BATCH:
            ids += used.ids
    uses = Counter(sample for step, ids in by_step.items() if step <= last for sample in ids)
    due = Counter(expected)
    return (uses - due).total(), (due - uses).total()


def hangs_of(struck: Sequence[float], begun: Sequence[float]) -> int:
    """After how many of the faults no step began within `BOUND_S`, though no other fault struck meanwhile. Times in
    seconds; a step that begins within `NOTICE_S` may have been under way.
    """
    until = [min(at_s + BOUND_S, after_s) for at_s, after_s in pairwise([*struck, float("inf")])]
    waited = [at_s for at_s, end_s in zip(struck, until, strict=True) if end_s == at_s + BOUND_S]
    return sum(not any(at_s + NOTICE_S < step_s <= at_s + BOUND_S for step_s in begun) for at_s in waited)


def expected_ids(side: str, steps: int) -> list[int]:
    """The samples of so many steps: by Shoal's order, or by that of PyTorch's `DistributedSampler`, both of seed 0."""
    if side == ELASTIC:
        return Order(SAMPLES, seed=0).ids(np.arange(steps * BATCH)).tolist()
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(SAMPLES, generator=generator)[: steps * BATCH].tolist()


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each side's struck rows."""
    found = []
    for side in (ELASTIC, RESTARTED):
        own = [row for row in rows if row["side"] == side and row["effective"] is not None]
        if own:
            figures = {name: round(statistics.median(row[name] for row in own), 3) for name in COUNTED}
            found.append({"side": side, "seeds": len(own), **figures})
    return found


def _train(side: str, faults: Sequence[Fault], setting: Setting) -> Trial:
    """Trains for so long from the first steps on, under the faults, and stops. Raises `EnvironmentFault`."""
    trial = Trial(side)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder, mark = Path(name), secrets.token_hex(8)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", RECORD: str(folder / "used.jsonl"), MARK: mark}
        environ |= {STEP: str(setting.step_s)}
        launcher = _start(_command(side, folder, setting), folder / "out.txt", environ, forked=setting.forked)
        try:
            _play(trial, launcher, folder / "used.jsonl", faults, setting.seconds)
        except BaseException:
            launcher.kill()
            print((folder / "out.txt").read_text(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            trial.orphans = end_orphans(mark)
        logs = sorted(folder.glob("run/logs/*.log"))
        trial.said = "\n".join(path.read_text(errors="replace")[-6000:] for path in (folder / "out.txt", *logs))
    return trial


def _start(command: Sequence[str], out: Path, environ: Mapping[str, str], *, forked: bool) -> Launcher:
    """Both outputs go to one file."""
    if forked and is_forked(command[1:]):
        return start(command[1:], cwd=Path.cwd(), env=environ, stdout=out, stderr=out)
    with out.open("wb") as file:
        return subprocess.Popen(command, env=environ, stdout=file, stderr=file)


def _command(side: str, folder: Path, setting: Setting) -> list[str]:
    if side == ELASTIC:
        (folder / "run.toml").write_text(RUN)
        keys = [f"run.directory={folder / 'run'}", f"checkpoint.every_steps={setting.save_every}"]
        keys += [f"elastic.max={setting.replicas}", f"sync.kind={setting.sync}"]
        keys += ["elastic.min=1" if setting.sync == "allreduce" else "elastic.min=2"]  # others are refused with one
        keys += [f"sync.period={EVERY_STEPS}"] if setting.sync in ("local", "streaming", "easgd") else []
        keys += ["sync.fragments=2", "sync.delay=1"] if setting.sync == "streaming" else []
        return [sys.executable, "-m", "shoal", "train", str(folder / "run.toml"), *keys]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.replicas}"]
    torchrun += ["--max-restarts=1000", "--shutdown-timeout=1", "-m", "benchmarks.random_faults_script"]
    return [*torchrun, str(folder), str(setting.save_every), str(SILENCE_S)]


def _play(trial: Trial, launcher: Launcher, path: Path, faults: Sequence[Fault], seconds: float) -> None:
    """The side from its start to its end. Raises `EnvironmentFault` where it does not begin to train."""
    watch = _Watch(trial, launcher, path)
    if not watch.until(lambda: watch.step >= FIRST_STEP, within_s=START_S):
        raise EnvironmentFault(f"the side {trial.side} ended, or did not begin to train within {START_S:g} s")
    trial.begin_s, trial.end_s = time.time(), time.time() + seconds
    for fault in faults:
        watch.until(lambda: False, within_s=trial.begin_s + fault.at_s - time.time())
        if watch.until(lambda: watch.candidates, within_s=trial.end_s - time.time()):
            victim = watch.candidates[int(fault.share * len(watch.candidates))]
            trial.struck.append((time.time(), victim, fault.signal))
            with suppress(ProcessLookupError):
                os.kill(victim, fault.signal)
    watch.until(lambda: False, within_s=trial.end_s - time.time())
    times = [at_s for at_s, _, _ in trial.struck]
    if times:
        within_s = max(times[-1] + BOUND_S, trial.end_s) - time.time()
        watch.until(lambda: watch.stepped_s > times[-1] + NOTICE_S, within_s=within_s)
    trial.hangs += hangs_of(times, [used.time_s for used in trial.record])
    struck = {pid for _, pid, _ in trial.struck}
    trial.ended_unstruck = len(trial.seen - struck - set(ranks_of(launcher.pid)))
    launcher.send_signal(signal.SIGTERM)
    try:
        trial.exit_code = launcher.wait(END_S)
    except subprocess.TimeoutExpired:
        trial.hangs += 1
        launcher.kill()
        launcher.wait()


class _Watch:
    """Reads the record and the processes of a side, again and again."""

    def __init__(self, trial: Trial, launcher: Launcher, path: Path) -> None:
        self._trial, self._launcher, self._path, self._offset = trial, launcher, path, 0
        self.step, self.stepped_s = 0, 0.0
        self.candidates: list[int] = []

    def until(self, found: Any, *, within_s: float) -> bool:
        """Looks until `found()`, at most so long and while the launcher runs; whether it was."""
        deadline_s = time.monotonic() + within_s
        while True:
            self._look()
            if found():
                return True
            if time.monotonic() >= deadline_s or self._launcher.poll() is not None:
                return False
            time.sleep(POLL_S)

    def _look(self) -> None:
        lines, self._offset = read_record(self._path, offset=self._offset)
        self._trial.record += lines
        if lines:
            self.step, self.stepped_s = lines[-1].step, lines[-1].time_s
        self.candidates = sorted(pid for pid in ranks_of(self._launcher.pid) if state_of(pid) not in "TtZX")
        self._trial.seen |= set(self.candidates)


def _told(trial: Trial) -> str:
    struck = "\n".join(f"{at_s - trial.begin_s:7.2f} s  {number.name}  {pid}" for at_s, pid, number in trial.struck)
    return f"{struck}\n{trial.said}"


if __name__ == "__main__":
    run(random_faults)
