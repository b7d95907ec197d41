"""Where two runs part: keys, environment, the first step with another loss, the first tensor with other bits."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.assembly.data_record import data_hashes, recorded_data
from shoal.checkpoint.objects import Places
from shoal.config.load import read
from shoal.config.named import GIVEN
from shoal.errors import ConfigError, EnvironmentFault, Stopped, UsageError
from shoal.files import cache_folder
from shoal.launcher.allocator import MMAP, TRIM
from shoal.launcher.children import wait_for
from shoal.launcher.lock import FILE_NAME as LOCK_NAME
from shoal.observe.busy import busy
from shoal.observe.events import read_events, series
from shoal.observe.facts import differing_keys, read_facts, recorded_run_file
from shoal.observe.provenance import file_hashes, git_state, packages
from shoal.observe.sink import ending_in
from shoal.runfile.load import load_run

if TYPE_CHECKING:
    from shoal.checkpoint.inspect import Comparison


COMPARED = ("loss/train", "grad/norm", "loss/eval")
ROUNDING = 1e-5
"""Relative difference of two losses that the order of sums alone explains in float32 (docs/reference/tolerances.md)."""
KEPT_MEMORY = (TRIM, MMAP)
"""Variables of the environment that are not compared: how much freed memory a rank keeps follows from the number of
ranks, and changes no number.
"""
OWN_FILES, FEW_FILES = "shoal/", 3
"""How the names of Shoal's own files begin, and how many of them are named one by one."""


class Parting(msgspec.Struct, frozen=True):
    """The first step at which a measurement is not the same number in both runs."""

    measurement: str
    step: int
    first: float | None
    second: float | None


class RunDiff(msgspec.Struct, frozen=True):
    """What differs between two runs.

    `steps` are those that both recorded, `parting` the earliest difference in them, `beyond_rounding` the first step at
    which the training losses differ by more than `ROUNDING`, `largest_relative` their largest relative difference.
    `tensors` compares the checkpoints of `checkpoint_step`, the last that both have; None without one. `data` and
    `environment` are sentences, one for each file, package, variable, version.
    """

    keys: dict[str, list[Any]]
    environment: list[str]
    data: list[str]
    steps: int
    parting: Parting | None
    beyond_rounding: int | None
    largest_relative: float
    checkpoint_step: int | None
    tensors: Comparison | None

    @property
    def same(self) -> bool:
        """Whether every loss and every tensor that both have is bitwise the same, and there is something to compare."""
        return self.steps > 0 and self.parting is None and not (self.tensors and self.tensors.differences)


def diff_runs(first: Path, second: Path) -> RunDiff:
    """Compares two run directories. Raises `UsageError` where one holds no run."""
    events = [_events(directory) for directory in (first, second)]
    losses = [dict(zip(*series(found, "loss/train"), strict=True)) for found in events]
    common = losses[0].keys() & losses[1].keys()
    apart = {step: _relative(losses[0][step], losses[1][step]) for step in common}
    partings = [found for name in COMPARED if (found := _parting(name, *events)) is not None]
    both = sorted({*Places(first).steps()} & {*Places(second).steps()})
    return RunDiff(
        keys=differing_keys([_settings(first), _settings(second)]),
        environment=environment_differences(*(_provenance(directory) for directory in (first, second))),
        data=data_differences(recorded_data(first), recorded_data(second)),
        steps=len(common),
        parting=min(partings, key=lambda one: one.step, default=None),
        beyond_rounding=min((step for step, size in apart.items() if size > ROUNDING), default=None),
        largest_relative=max(apart.values(), default=0.0),
        checkpoint_step=both[-1] if both else None,
        tensors=_compared(first, second, both[-1]) if both else None,
    )


def _compared(first: Path, second: Path, step: int) -> Comparison:
    from shoal.checkpoint.inspect import compare  # imports torch

    return compare(Places(first).step(step), Places(second).step(step))


def environment_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """A sentence for each package, file, variable and version that is not the same in two records of provenance; one
    for Shoal's own files, where they are many.
    """
    if not first or not second:
        return ["code and packages were not recorded by both runs, so they are not compared"]
    found = []
    if first.get("python") != second.get("python"):
        found.append(f"Python was {first.get('python')}, is {second.get('python')}")
    if first.get("git") != second.get("git"):
        found.append(f"the repository was at {_commit(first)}, is at {_commit(second)}")
    for kind, label in (("packages", "package"), ("environment", "environment variable")):
        for name, (before, after) in _changed(first.get(kind), second.get(kind)).items():
            if name in KEPT_MEMORY:
                continue
            found.append(f"{label} {name} was {before or 'not there'}, is {after or 'not there'}")
    files = _changed(first.get("files"), second.get("files"))
    own = [name for name in files if name.startswith(OWN_FILES)]
    if len(own) > FEW_FILES:
        found.append(f"{len(own)} files of Shoal itself are others, {own[0]} among them")
        files = {name: each for name, each in files.items() if name not in own}
    for name, (before, after) in files.items():
        found.append(f"file {name} {'has changed' if before and after else 'is gone' if before else 'is new'}")
    return found


def data_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """A sentence for each file of data that is not the same in two records of `data.json`."""
    if not first and not second:
        return []
    ours, theirs = first.get("files"), second.get("files")
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        why = next((str(one["error"]) for one in (first, second) if "error" in one), "one of the runs ended before")
        return [f"the data are not compared, as they were not hashed ({why})"]
    words = {(True, True): "has other content", (True, False): "is gone", (False, True): "is new"}
    return [
        f"the data changed: file {name} {words[before is not None, after is not None]}"
        for name, (before, after) in _changed(ours, theirs).items()
    ]


def draw(first: Path, second: Path, picture: Path) -> None:
    """Both training losses over the steps, as a picture."""
    # Half a second of imports that nobody else should wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for directory, colour in ((first, "#0b7a75"), (second, "#d9532c")):
        axes.plot(*series(_events(directory), "loss/train"), label=str(directory), color=colour, linewidth=1.5)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture)


def _parting(name: str, first: list, second: list) -> Parting | None:
    ours, theirs = (dict(zip(*series(events, name), strict=True)) for events in (first, second))
    for step in sorted(ours.keys() & theirs.keys()):
        a, b = ours[step], theirs[step]
        if a != b and not (math.isnan(a) and math.isnan(b)):
            return Parting(name, step, *(value if math.isfinite(value) else None for value in (a, b)))
    return None


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    found = abs(a - b) / max(abs(a), abs(b))
    return found if math.isfinite(found) else math.inf


def _changed(first: object, second: object) -> dict[str, tuple[Any, Any]]:
    ours, theirs = (one if isinstance(one, dict) else {} for one in (first, second))
    pairs = {name: (ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())}
    return {name: pair for name, pair in pairs.items() if any(a != b for a, b in pairwise(pair))}


def _commit(record: Mapping[str, Any]) -> str:
    git = record.get("git")
    if not isinstance(git, dict):
        return "no commit"
    return f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"


def _events(directory: Path) -> list:
    recorded_run_file(directory)
    return read_events(directory)


def _settings(directory: Path) -> dict[str, Any]:
    try:
        return read(directory / "run.toml")
    except ConfigError as fault:
        raise UsageError(
            f"{directory}/run.toml is not TOML ({fault}); it should be as 'shoal train' wrote it"
        ) from fault


def _provenance(directory: Path) -> Mapping[str, Any]:
    found = read_facts(directory).get("provenance")
    return found if isinstance(found, dict) else {}


# The same run again, in another directory, and whether every loss and every tensor is bitwise the same.


class Reproduction(msgspec.Struct, frozen=True):
    """`changed`: what is not as it was when the run was recorded, in sentences; `diff`: the two runs compared."""

    directory: str
    changed: list[str]
    diff: RunDiff


def reproduce(run_directory: Path, into: Path) -> Reproduction:
    """Trains the run of `run_directory` again into `into`, where it was started and with its environment. What was
    begun there, and interrupted, goes on.

    Raises `UsageError` where it cannot be started again, `Stopped` at Ctrl-C, `EnvironmentFault` where it ends with an
    error.
    """
    record = provenance_of(run_directory)
    if into.exists() and not _is_begun(run_directory, into):
        raise UsageError(f"{into} exists: name a new folder with --into, or remove it")
    started_in = Path(record["directory"])
    if not started_in.is_dir():
        raise EnvironmentFault(f"the run was started in {started_in}, which is not there: put its files back")
    data = data_hashes(load_run(run_directory / "run.toml").data, started_in, cache=cache_folder(os.environ))
    recorded = recorded_data(run_directory)
    changed = environment_differences(record, present(record))
    changed += data_differences(recorded, data) if recorded else []
    command = [sys.executable, "-m", "shoal", "train", str((run_directory / "run.toml").resolve())]
    environ = {**os.environ, **record.get("environment", {})}
    again = subprocess.Popen(
        [*command, f"run.directory={str(into.resolve())!r}"], cwd=started_in, env=environ, stdout=sys.stderr
    )
    try:
        code = wait_for(again)
    except KeyboardInterrupt:
        raise Stopped(f"interrupted: {into} holds what was trained, and the same command resumes from there") from None
    if code != 0:
        raise EnvironmentFault(
            f"the run, started again, ended with exit code {code}; its own sentence is above, and "
            f"what has changed since: {'; '.join(changed) or 'nothing that was recorded'}"
        )
    with busy(f"comparing {run_directory} and {into}"):
        return Reproduction(str(into), changed, diff_runs(run_directory, into))


def _is_begun(run_directory: Path, into: Path) -> bool:
    """Whether `into` holds the beginning of the same run, as an interrupted call has left it."""
    if not (into / "run.toml").is_file():
        return {path.name for path in into.iterdir()} <= {"logs", LOCK_NAME}
    begun, ending = load_run(into / "run.toml"), ending_in(read_facts(into))
    same = begun == load_run(run_directory / "run.toml", [f"run.directory={str(begun.run.directory)!r}"])
    return same and (ending is None or ending.state != "finished")


def present(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that is started now would be made of, for the files and variables that `record` names."""
    directory = Path(record["directory"])
    recorded = record.get("environment", {})
    return {
        "python": platform.python_version(),
        "packages": packages(),
        "git": git_state(directory),
        "files": file_hashes(record.get("files", {}), directory),
        "environment": recorded,  # it is given to the ranks again
    }


def provenance_of(run_directory: Path) -> Mapping[str, Any]:
    """What the run was made of, `directory` among it: where it was started. Raises `UsageError` where it cannot be
    started again.
    """
    tables = read(recorded_run_file(run_directory))
    given = [name for name, table in tables.items() if isinstance(table, dict) and table.get("build") == GIVEN]
    if given:
        raise UsageError(
            f"the {given[0]} of {run_directory} is an object of a script, which the run directory does not hold: "
            "run that script again with another run.directory, and compare with 'shoal diff'"
        )
    record = read_facts(run_directory).get("provenance")
    if not isinstance(record, dict) or not isinstance(record.get("directory"), str):
        raise UsageError(
            f"{run_directory}/facts.json does not say what the run was made of, which runs of earlier versions did "
            "not record: train it again, and compare with 'shoal diff'"
        )
    return record
