"""What a scheduler is asked for: hosts, ranks on each, what they compute on, how long, and the command of each host.

A `SubmittedJob` knows no scheduler. `slurm.py`, `kubernetes.py` and `ray.py` write it down for theirs; all of them
start `shoal launch` once on each host, which starts that host's ranks and keeps their exit code (`launcher.host`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from shoal.errors import Diverged, UsageError, VerificationFailed
from shoal.launcher.environment import is_secret
from shoal.launcher.store.messages import JOB_TOKEN
from shoal.observe.provenance import RECORDED_NAMES
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile, run_directory, with_processes

DEFAULT_CPUS = 1
SAVE_S = 120
FATAL_CODES = (UsageError.exit_code, Diverged.exit_code, VerificationFailed.exit_code)
"""Exit codes after which another start would end alike."""
RESTARTS = 100
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Resources:
    """What each of `nodes` hosts gives. `memory_gib` of a host; None: the scheduler's default.

    `time_s` bounds one start; `save_s` before that the ranks are told to save. Both None where there is no limit.
    """

    nodes: int
    ranks_per_node: int
    gpus_per_node: int = 0
    cpus_per_rank: int = DEFAULT_CPUS
    memory_gib: int | None = None
    time_s: int | None = None
    save_s: int = SAVE_S

    @property
    def world_size(self) -> int:
        """The ranks of all hosts."""
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        """The cores of a host's ranks."""
        return self.ranks_per_node * self.cpus_per_rank


@dataclass(frozen=True)
class Array:
    """A sweep as one array: `file` is the sweep file, `tasks` its trials, of which `parallel` run at once."""

    file: Path
    tasks: int
    parallel: int


@dataclass(frozen=True)
class SubmittedJob:
    """A run, ready to be written for a scheduler.

    `variables` reach every rank and stand in the job file; `secrets` are names alone, whose values the scheduler adds.
    `restarts` bounds how often the job starts again after 75, a lost host or a lost rank. `folder` is where the job is
    submitted from, and `python` the interpreter there: relative paths of the run file start in the folder. With an
    `array`, each of its tasks trains a trial of a sweep, and the run file says the sweep's name and folder. With a
    `script` (its file, its arguments), the ranks run that in the place of the run file, which describes its run.
    """

    run_file: RunFile
    resources: Resources
    folder: Path
    python: str = "python3"
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    restarts: int = RESTARTS
    array: Array | None = None
    script: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run_file.run.name

    @property
    def directory(self) -> Path:
        """The run's folder, absolute."""
        return self.folder / run_directory(self.run_file)

    @property
    def job_files(self) -> Path:
        """Where the job files lie: beside the run."""
        return self.directory / "submit"

    def host_command(self, run_file: str, *, directory: str, python: str) -> tuple[str, ...]:
        """The command of each host; its arguments as the hosts see them."""
        launch = ("launch", "--ranks-per-node", str(self.resources.ranks_per_node), "--directory", directory)
        return (python, "-m", "shoal", *launch, *(self.script or ("-m", "shoal", "train", run_file)))


def array_job(job: SubmittedJob, array: Array, *, name: str, directory: str) -> SubmittedJob:
    """The job of a sweep, from that of its run file. Raises `UsageError` for a trial of several hosts."""
    if job.resources.nodes > 1:
        raise UsageError(
            f"each trial of the sweep would need {job.resources.nodes} hosts, and a task of an array starts its ranks "
            "on one: ask for --nodes 1, or submit the trials as runs"
        )
    run = msgspec.structs.replace(job.run_file.run, name=name, directory=directory)
    return replace(job, run_file=msgspec.structs.replace(job.run_file, run=run), array=array)


def world_size_of(run_file: RunFile, *, nodes: int | None, ranks_per_node: int | None) -> int:
    """How many ranks the job has: as the run file says, else hosts times ranks. Raises `UsageError` without either."""
    stated = run_file.stated_processes
    if stated is not None:
        return stated
    if ranks_per_node is None:
        raise UsageError(
            "nothing says how many ranks the run has: set run.processes or an axis of [layout], or "
            "give --nodes and --ranks-per-node"
        )
    return (nodes or 1) * ranks_per_node


def divide(world_size: int, *, nodes: int | None, ranks_per_node: int | None) -> tuple[int, int]:
    """Hosts, and ranks on each. Raises `UsageError` where `world_size` ranks do not divide so."""
    if nodes is None:
        nodes = -(-world_size // ranks_per_node) if ranks_per_node else 1
    each = ranks_per_node or max(1, world_size // nodes)
    if nodes * each != world_size:
        fitting = [count for count in range(1, world_size + 1) if world_size % count == 0]
        listed = ", ".join(map(str, fitting[:8])) + (", ..." if len(fitting) > 8 else "")
        raise UsageError(
            f"{world_size} ranks are not {nodes} hosts of {each}: every host has as many ranks; "
            f"give --nodes {listed}, or change the layout (shoal plan says which fit)"
        )
    return nodes, each


def job_of(
    run_file: RunFile,
    resources: Resources,
    *,
    file: str,
    folder: Path,
    python: str = "python3",
    variables: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    restarts: int = RESTARTS,
) -> SubmittedJob:
    """The job of a run file, checked as `shoal train` would. Raises `UsageError` and `ConfigError`."""
    if resources.time_s is not None and resources.time_s <= resources.save_s:
        raise UsageError(
            f"a time limit of {resources.time_s} s leaves nothing to train in: ranks are told to save "
            f"{resources.save_s} s before it; give a longer --time or a shorter --save-before"
        )
    run_file.layout.layout(resources.world_size)
    run_file = with_processes(run_file, resources.world_size)
    check_across(run_file, file=file)
    return SubmittedJob(run_file, resources, folder, python, dict(variables or {}), tuple(secrets), restarts)


def split_variables(assignments: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """`NAME=value` and `NAME` (its value here), as variables for the job file and names of secrets.

    A name that sounds like a secret never brings its value into a file. The ranks are told which names were given, so
    that the run records them. Raises `UsageError`.
    """
    variables: dict[str, str] = {}
    secrets: list[str] = []
    for text in assignments:
        name, given, value = text.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise UsageError(f"--env {text[:60]!r} names no variable: write --env NAME=value, or --env NAME")
        held = value if given else environ.get(name, "")
        if is_secret(name, held) and name != JOB_TOKEN:  # which names a file
            if given:
                raise UsageError(
                    f"--env {name}=... would write a secret into the job file, which others can read: "
                    f"give --env {name} alone; Slurm takes it from your environment, Kubernetes from --secret"
                )
            secrets.append(name)
        elif given or name in environ:
            variables[name] = held
        else:
            raise UsageError(f"--env {name}: the variable is not set here; write --env {name}=value")
        if any(not character.isprintable() for character in variables.get(name, "")):
            raise UsageError(
                f"--env {name}: its value has a control character, which a job file cannot hold; change it"
            )
    if recorded := [name for name in variables if name != JOB_TOKEN]:
        variables[RECORDED_NAMES] = ",".join(recorded)
    return variables, tuple(secrets)


def seconds_of(text: str) -> int:
    """A time limit: minutes, or as Slurm writes it, [D-]H:MM:SS. Raises `UsageError`."""
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if found is None:
        raise UsageError(f"--time {text[:40]!r} is no time: write minutes (90), or D-HH:MM:SS (1-12:00:00)")
    days, first, second, third = found.groups()
    if days is None and second is None:
        return int(first) * 60
    if days is None and third is None:
        return int(first) * 60 + int(second)
    return int(days or 0) * 86_400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
