"""The same run again, in another directory, and whether every loss and every tensor is bitwise the same."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.load import read
from shoal.errors import EnvironmentFault, UsageError
from shoal.experiments.diff import RunDiff, diff_runs, environment_differences
from shoal.observe.facts import read_facts
from shoal.recipes.provenance import file_hashes, git_state, packages
from shoal.recipes.user_code import GIVEN


class Reproduction(msgspec.Struct, frozen=True):
    """`changed`: what is not as it was when the run was recorded, in sentences; `diff`: the two runs compared."""

    directory: str
    changed: list[str]
    diff: RunDiff


def reproduce(run_directory: Path, into: Path) -> Reproduction:
    """Trains the run of `run_directory` again into `into`, where it was started and with its environment.

    Raises `UsageError` where it cannot be started again, `EnvironmentFault` where it ends with an error.
    """
    record = _record(run_directory)
    if into.exists():
        raise UsageError(f"{into} exists: name a new folder with --into, or remove it")
    started_in = Path(record["directory"])
    if not started_in.is_dir():
        raise EnvironmentFault(f"the run was started in {started_in}, which is not there: put its files back")
    changed = environment_differences(record, present(record))
    command = [sys.executable, "-m", "shoal", "train", str((run_directory / "run.toml").resolve())]
    environ = {**os.environ, **record.get("environment", {})}
    done = subprocess.run(
        [*command, f"run.directory={str(into.resolve())!r}"], cwd=started_in, env=environ, check=False,
        stdout=sys.stderr,
    )  # fmt: skip
    if done.returncode != 0:
        raise EnvironmentFault(
            f"the run, started again, ended with exit code {done.returncode}; its own sentence is above, and "
            f"what has changed since: {'; '.join(changed) or 'nothing that was recorded'}"
        )
    return Reproduction(str(into), changed, diff_runs(run_directory, into))


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


def _record(run_directory: Path) -> Mapping[str, Any]:
    tables = read(run_directory / "run.toml")
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
