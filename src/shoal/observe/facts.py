"""What is known of a run beside its steps: `facts.json`, one object in the run directory.

Any key may be written, and the report shows all of them. It has a place of its own for these:

    "state"       how the run ended: "" while it runs, else "finished", "stopped", "diverged" or "failed"
    "failure"     {"cause": "...", "rank": 1, "exit_code": 1}: why, where it did not reach its last step
    "world"       ranks                         "parameters"  trained parameters, as a number
    "loss_unit"   "nats/byte", "nats/token"     "baseline"    {"name": "bigram", "loss": 2.47}
    "evaluation"  {"loss": 2.04, ...}           "samples"     [{"step": 900, "prompt": "def ", "text": "..."}]

Numbers that are not finite become null. Only rank 0 writes, and the launcher when all ranks have ended.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import UsageError
from shoal.files import meant, read_json

MOST_BYTES = 16 << 20
"""A run's facts take a few KiB."""


def facts_path(run_directory: Path) -> Path:
    """Where the facts lie."""
    return run_directory / "facts.json"


def recorded_run_file(run_directory: Path) -> Path:
    """The run file that a run has left in its directory. Raises `UsageError` where there is none."""
    path = run_directory / "run.toml"
    if not path.is_file():
        found = "holds no run" if run_directory.is_dir() else "is a file" if run_directory.exists() else "is not there"
        found += meant(run_directory)
        raise UsageError(f"{run_directory} {found}: give a directory that 'shoal train' wrote, such as runs/NAME")
    return path


def read_facts(run_directory: Path) -> dict[str, Any]:
    """The facts so far, {} where there are none. Raises `UsageError` for a file that holds no JSON object."""
    path = facts_path(run_directory)
    if not path.is_file():
        return {}
    repair = "move it away, and the run writes a new one"
    return read_json(path, dict[str, Any], limit_bytes=MOST_BYTES, error=UsageError, repair=repair)


def write_facts(run_directory: Path, facts: Mapping[str, Any]) -> None:
    """Adds `facts` to those on disk; a key that is there already is replaced. A reader sees the old file or the new."""
    merged = read_facts(run_directory) | dict(facts)
    run_directory.mkdir(parents=True, exist_ok=True)
    replace_file(facts_path(run_directory), msgspec.json.format(msgspec.json.encode(merged), indent=2) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file by one atomic rename, after its bytes have reached the disk. An `OSError` names `path`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as fault:
        fault.filename = str(path)  # `write` and `fsync` do not say of which file
        raise
    finally:
        draft.unlink(missing_ok=True)


def number_of(value: Any) -> float | None:
    """A finite number, or None: facts come from a file that anybody may have written."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or value != value:
        return None
    return float(value)


def text_of(value: Any) -> str:
    """A text, or "": facts come from a file that anybody may have written."""
    return value if isinstance(value, str) else ""


# The keys of run files side by side: which of them differ between runs. Pure.


OF_THE_RUN_ITSELF = frozenset({"run.name", "run.directory"})
"""Keys that name a run, and differ between any two runs; a run that is started again can have another name."""


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Tables without nesting: `{"run": {"steps": 9}}` as `{"run.steps": 9}`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def differing_keys(
    runs: Sequence[Mapping[str, Any]], *, left_out: Set[str] = OF_THE_RUN_ITSELF
) -> dict[str, list[Any]]:
    """The keys that are not the same in all runs, with each run's value (None where it has none), sorted by key."""
    tables = [flat(run) for run in runs]
    keys = sorted(set().union(*tables) - left_out) if tables else []
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}
