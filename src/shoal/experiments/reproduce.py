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

from shoal.assembly.data_record import data_hashes, recorded_data
from shoal.assembly.user_code import GIVEN
from shoal.config.load import read
from shoal.data.corpora import cache_folder
from shoal.errors import EnvironmentFault, Stopped, UsageError
from shoal.experiments.diff import RunDiff, data_differences, diff_runs, environment_differences
from shoal.launch.children import wait_for
from shoal.launch.lock import FILE_NAME as LOCK_NAME
from shoal.observe.ending import ending_in
from shoal.observe.facts import read_facts, recorded_run_file
from shoal.observe.provenance import file_hashes, git_state, packages
from shoal.runfile.load import load_run


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
    record = _record(run_directory)
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
        raise Stopped(f"interrupted: {into} holds what was trained, and the same command goes on from there") from None
    if code != 0:
        raise EnvironmentFault(
            f"the run, started again, ended with exit code {code}; its own sentence is above, and "
            f"what has changed since: {'; '.join(changed) or 'nothing that was recorded'}"
        )
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


def _record(run_directory: Path) -> Mapping[str, Any]:
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
