"""`python -m benchmarks.random_restarts`: jobs struck at random times, started again until they end: the same bits?

Each seed draws a fault, a moment of the job's undisturbed duration, and one of the job's processes:

    kill    SIGKILL
    stop    SIGSTOP, and SIGCONT after as many seconds as are drawn from `STOPPED_S`
    cut     all its TCP connections end
    full    the file system of the run directories has not a byte left for `FULL_S` (root)

A program that ends with another code than 0 is started again by the same command, as a scheduler would do it; the
others of the job go on. What `JOBS` has:

    train       two ranks under ZeRO-1, over TCP
    server      two workers and a server, in lock-step; `bounded` and `backup`: those rules, whose runs do not repeat
    own-loop    a script's own loop with two optimizers, each on its own microbatches
    remote      copies in an S3 store; each start finds an empty run directory
    elastic     two replicas that sum in one fixed order
    federated   a server and two clients; `secret`: under secure aggregation, whose rounds may pass without an update
    rehearse    `shoal rehearse` itself, of faults of a save

A row counts, besides the fault:

    codes       how the programs' starts ended that did not end with 0
    bits        whether the state at the end is that of the undisturbed job; None: the job does not promise it
    named       whether the failure's output names the rank that was struck, or the full disk; None: nothing failed,
                or a process was struck that is no rank
    hangs       programs that did not end within `BOUND_S`, or were started more than `MOST_STARTS` times
    orphans     processes that are left some seconds after the end
    left        names of shared memory, and mounts, that the job has left

The exit code is 1 where a row breaks a promise.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.command import run
from benchmarks.random_faults_job import RECORD, STEP
from benchmarks.random_restarts_jobs import JOBS, RUNS
from benchmarks.struck_processes import MARK, POLL_S, cut_connections, end_orphans, environ_at, marked
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report
from shoal.checkpoint.commit import newest_verified
from shoal.checkpoint.load import read_all
from shoal.errors import EnvironmentFault, UsageError
from shoal.experiments.rehearsal.faults import end_fill, fill, small_disk
from tests.checkpoint.s3_server import s3_server
from tests.programs import Program, start

BOUND_S, MOST_STARTS = 240.0, 20
STOPPED_S, FULL_S = (3.0, 25.0), (1.0, 5.0)
DISK_BYTES = 24 << 20
_CLONE_NEWNS = 0x00020000


class Fault(NamedTuple):
    """At `at` of the undisturbed duration, in [0, 1), a process is struck for `for_s` seconds; `share` says which."""

    kind: str
    at: float
    share: float
    for_s: float


def fault_of(seed: int, job: str) -> Fault:
    """The fault of a seed."""
    draw = random.Random(f"{job} {seed}")
    kind = draw.choice(JOBS[job].faults)
    return Fault(kind, draw.random(), draw.random(), draw.uniform(*(FULL_S if kind == "full" else STOPPED_S)))


@dataclass
class Outcome:
    """How a job went. `rank`: that of the struck process, None where it was no rank; `struck`: what it was."""

    seconds: float = 0.0
    struck: str = ""
    rank: int | None = None
    codes: list[int] = field(default_factory=list)
    hangs: int = 0
    orphans: int = 0
    left: list[str] = field(default_factory=list)
    state: dict[str, Tensor] | None = None
    said: str = ""


def random_restarts(
    jobs: Annotated[str, typer.Option(help="Which of the jobs, by commas.")] = ",".join(JOBS),
    seeds: Annotated[int, typer.Option(help="Faults of each job.", min=1)] = 4,
    first_seed: Annotated[int, typer.Option(help="The first seed.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Random faults of jobs that are started again: exit codes, bits, sentences, hangs, orphans.

    Example: python -m benchmarks.random_restarts --jobs server,federated --seeds 3
    """
    names = jobs.split(",")
    if wrong := sorted(set(names) - set(JOBS)):
        raise UsageError(f"there is no job {wrong[0]!r}; there are {', '.join(JOBS)}")
    result = measure(names, range(first_seed, first_seed + seeds))
    print_report("random_restarts", result, as_json=as_json)
    if not all(one["holds"] for one in result["checks"]):
        raise typer.Exit(1)


def measure(names: Sequence[str], seeds: Sequence[int]) -> Result:
    """A row for each job and seed, and the checks over all."""
    _own_shared_memory()
    rows = []
    for name in names:
        calm = play(name, None)
        if calm.codes or calm.hangs or calm.orphans or calm.left:
            raise EnvironmentFault(f"the job {name} did not end well when it was left in peace: {calm.said[-2000:]}")
        for seed in seeds:
            fault = fault_of(seed, name)
            outcome = play(name, fault, calm_s=calm.seconds)
            rows.append(row_of(name, seed, fault, outcome, calm.state))
            print(rows[-1], file=sys.stderr, flush=True)
            if not all(one["holds"] for one in checks_of(rows[-1:])):
                print(outcome.said, file=sys.stderr, flush=True)
    return {"rows": rows, "checks": checks_of(rows)}


def _own_shared_memory() -> None:
    """Gives this process a /dev/shm of its own, so that what is left there is the jobs'. Raises `EnvironmentFault`."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        raise EnvironmentFault("this benchmark mounts a /dev/shm of its own: run it as root")
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", "/dev/shm"]):
        subprocess.run(["mount", *command], check=True)
    null = Path(os.devnull)
    start(["-m", "shoal", "--version"], cwd=Path.cwd(), env=os.environ, stdout=null, stderr=null).wait()  # its server


def _named_things() -> set[str]:
    """Names that outlive processes: of shared memory, and of file systems and network namespaces."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {*os.listdir("/dev/shm"), *(line.split()[1] for line in mounts)}


def row_of(
    name: str, seed: int, fault: Fault, outcome: Outcome, expected: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """The figures of one outcome, whose state should be `expected`."""
    return {
        "job": name,
        "seed": seed,
        "fault": fault.kind,
        "at": round(fault.at, 3),
        "struck": outcome.struck,
        "codes": outcome.codes,
        "bits": same(outcome.state, expected) if JOBS[name].bits else None,
        "named": named(fault, outcome),
        "hangs": outcome.hangs,
        "orphans": outcome.orphans,
        "left": outcome.left,
    }


def checks_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is promised, over all rows."""
    return [
        check("states that differ", sum(row["bits"] is False for row in rows), 0, at_most=True),
        check("failures whose culprit is not named", sum(row["named"] is False for row in rows), 0, at_most=True),
        check("hangs", sum(row["hangs"] for row in rows), 0, at_most=True),
        check("processes left", sum(row["orphans"] for row in rows), 0, at_most=True),
        check("names of shared memory and mounts left", sum(len(row["left"]) for row in rows), 0, at_most=True),
    ]


def named(fault: Fault, outcome: Outcome) -> bool | None:
    """Whether the output says what was struck, where the job failed by it."""
    if not outcome.codes:
        return None
    if fault.kind == "full":
        return re.search("no space left|disk is full", outcome.said, re.IGNORECASE) is not None
    if outcome.rank is None:
        return None
    return re.search(rf"\brank {outcome.rank}\b", outcome.said) is not None


def same(found: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor] | None) -> bool:
    """Whether both have the same names and bits; `NaN` is not expected."""
    if found is None or expected is None or found.keys() != expected.keys():
        return False
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def play(name: str, fault: Fault | None, *, calm_s: float = 0.0) -> Outcome:
    """The job to its end, struck by `fault` if there is one."""
    job, outcome, before = JOBS[name], Outcome(), _named_things()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as path, ExitStack() as stack:
        folder, mark = Path(path), secrets.token_hex(8)
        runs = folder / RUNS
        if fault is not None and fault.kind == "full":
            stack.enter_context(small_disk(runs, DISK_BYTES))
        tables = dict(job.tables)
        if "remote" in tables.get("checkpoint", {}):
            tables["checkpoint"] = {**tables["checkpoint"], "remote_options": stack.enter_context(s3_server()).options}
        environ = {**os.environ, "OMP_NUM_THREADS": "1", RECORD: str(folder / "used.jsonl"), STEP: "0.1", MARK: mark}
        environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        world = _World(folder, job.programs(folder, tables), environ, outcome, moves=job.moves)
        try:
            world.play(fault, calm_s)
        finally:
            outcome.orphans = end_orphans(mark)
        outcome.state = _state_of(runs / "run")
        outcome.said = world.said()
    outcome.left = sorted(_named_things() - before)
    return outcome


class _World:
    """The programs of a job, started in `folder` and again where they fail."""

    def __init__(
        self,
        folder: Path,
        programs: Mapping[str, list[str]],
        environ: Mapping[str, str],
        outcome: Outcome,
        *,
        moves: bool,
    ) -> None:
        self._folder, self._programs, self._environ = folder, programs, environ
        self._outcome, self._moves = outcome, moves
        self._starts: dict[str, int] = dict.fromkeys(programs, 0)
        self._running: dict[str, Program] = {}

    def play(self, fault: Fault | None, calm_s: float) -> None:
        """To the end of all programs, or until they take too long; then they are killed."""
        begin_s = time.monotonic()
        for name in self._programs:
            self._start(name)
        strike_s = None if fault is None else begin_s + fault.at * calm_s
        undo, undo_s = _nothing, None
        while self._running and time.monotonic() < begin_s + BOUND_S:
            now_s = time.monotonic()
            if fault is not None and strike_s is not None and now_s >= strike_s:
                struck = self._strike(fault)
                if struck is not None:
                    undo, strike_s, undo_s = struck, None, now_s + fault.for_s
            if undo_s is not None and now_s >= undo_s:
                undo()
                undo_s = None
            self._look()
            time.sleep(POLL_S)
        undo()
        self._outcome.hangs += len(self._running)
        self._outcome.seconds = time.monotonic() - begin_s
        for program in self._running.values():
            program.kill()
            program.wait()

    def _look(self) -> None:
        for name, program in list(self._running.items()):
            code = program.poll()
            if code is None:
                continue
            del self._running[name]
            program.wait()
            if code == 0:
                continue
            self._outcome.codes.append(code)
            if self._starts[name] < MOST_STARTS:
                self._start(name)
            else:
                self._outcome.hangs += 1

    def _start(self, name: str) -> None:
        if self._moves:
            shutil.rmtree(self._folder / RUNS / "run", ignore_errors=True)
        self._starts[name] += 1
        out = self._folder / f"{name}-{self._starts[name]}.out"
        self._running[name] = start(self._programs[name], cwd=self._folder, env=self._environ, stdout=out, stderr=out)

    def _strike(self, fault: Fault) -> Callable[[], None] | None:
        """Strikes; what ends it. None where the job's processes have only just been forked, and are not known yet."""
        if fault.kind == "full":
            self._outcome.struck = "disk"
            with suppress(OSError):
                fill(self._folder / RUNS)
            return functools.partial(end_fill, self._folder / RUNS)
        if not (there := sorted(marked(self._environ[MARK]))):
            return None
        first = int(fault.share * len(there))
        cut, victim = 0, there[first]
        if fault.kind == "cut":  # of a process that has connections
            cut, victim = next(filter(itemgetter(0), map(_cut, there[first:] + there[:first])), (0, victim))
        environ = environ_at(victim)
        self._outcome.rank = int(environ["RANK"]) if "LOCAL_RANK" in environ and "RANK" in environ else None
        self._outcome.struck = self._name_of(victim) + (f", {cut} connections" if fault.kind == "cut" else "")
        if fault.kind == "cut":
            return _nothing
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        return functools.partial(_continue, victim) if fault.kind == "stop" else _nothing

    def _name_of(self, pid: int) -> str:
        programs = {program.pid: name for name, program in self._running.items()}
        return programs.get(pid, "a child" if self._outcome.rank is None else f"rank {self._outcome.rank}")

    def said(self) -> str:
        """What programs and ranks have printed."""
        paths = [*sorted(self._folder.glob("*.out")), *sorted(self._folder.glob(f"{RUNS}/**/*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in paths)


def _cut(pid: int) -> tuple[int, int]:
    return cut_connections(pid), pid


def _nothing() -> None:
    """A fault that ends by itself."""


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _state_of(directory: Path) -> dict[str, Tensor] | None:
    """The newest checkpoint's tensors, or a federated run's last model; None where there is neither."""
    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    if not directory.exists():
        return None
    manifest, _ = newest_verified(directory)
    return None if manifest is None else {**read_all(manifest, directory), "step": torch.tensor(manifest.step)}


if __name__ == "__main__":
    run(random_restarts)
