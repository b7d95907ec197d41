"""A finished run is never trained over: with other keys, the same command trains a new run beside it, `NAME-2`.

    cut off, stopped, failed                          resumed, as ever
    finished, with the same keys or more steps        resumed: nothing to train, or the steps that are missing
    finished, and a key, the script or its code is another one   a new run: NAME-2, NAME-3, ... in a folder of its own

Keys that do not change what is computed (the layout, wires, what is shown) make no new run. A new run starts from no
checkpoint and has a cursor of its own, so each run still uses every sample exactly once. Going back to the keys of an
earlier run finds that run again. `--fresh` asks for a new run in any case, `--resume` for the newest one as it is.

The process that starts the ranks chooses, and tells them by `CHOSEN`. Ranks of another launcher, and hosts that join a
coordinator, cannot agree on a folder before they meet: there a finished run with other keys is refused. Imports no
torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.checkpoint.objects import Places
from shoal.config.load import read
from shoal.errors import ConfigError, UsageError
from shoal.launcher.environment import place_from
from shoal.launcher.own_script import DESCRIBES, EXPECTS, READS_FOR, Reached, keys_told
from shoal.launcher.supervision import say
from shoal.observe.facts import differing_keys, facts_path, read_facts, write_facts
from shoal.observe.provenance import argument_hash, file_hashes, is_shoals_command
from shoal.resilience.config import COORDINATOR
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory

Intent = Literal["auto", "fresh", "resume"]
"""`auto`: as the table above says."""
CHOSEN = "SHOAL_CHOSEN_RUN"
"""By the run directory that a run file names: the number of the run that was chosen, 1 for that directory itself."""
FOLLOWS = "follows"
"""The fact by which a new run is known: the name of the run that it follows."""
SAME_RESULT = (
    *("run.", "layout.", "pipeline.", "context.", "wire.", "gradients.", "elastic.", "memory."),
    *("observe.", "hooks.", "checkpoint.", "batch.micro_samples", "batch.division"),
    *("data.prefetch_steps", "data.readers", "data.reader_kind"),
)
"""Beginnings of keys that change at most the order of summation."""
STILL_DECIDE = ("run.seed", "run.steps", "run.warm_start", "pipeline.codec")
"""Keys that begin so, and decide the result all the same."""
FLAGS: Mapping[str, Intent] = {"--fresh": "fresh", "--resume": "resume"}
MOST_NAMED = 3


def chosen_run(
    run_file: RunFile, intent: Intent = "auto", *, environ: MutableMapping[str, str] = os.environ
) -> RunFile:
    """The run file, or the same under the name and in the folder of a new run; says so where it is another one.

    Raises `UsageError` where ranks of another launcher come upon a finished run with other keys, or where the folder is
    that of other runs, and `Reached` in a process that was started to learn which run it is.
    """
    if DESCRIBES in environ:
        raise Reached(run_file)
    own = str(run_directory(run_file).resolve())
    _require_no_folder_of_runs(run_file)
    chosen: dict[str, int] = json.loads(environ.get(CHOSEN, "{}"))
    place = place_from(environ)
    if place is not None or READS_FOR in environ:
        if own not in chosen:
            _require_resumable(run_file, intent)
        return numbered(run_file, chosen.get(own, 1))
    if environ.get(COORDINATOR):
        _require_resumable(run_file, intent)
        return run_file
    number = _number(run_file, intent)
    environ[CHOSEN] = json.dumps(chosen | {own: number})
    return numbered(run_file, number)


def with_flag(overrides: Sequence[str], resume: bool | None) -> list[str]:
    """The overrides of a script, with the flag that `resume` stands for."""
    return [*overrides, *([] if resume is None else ["--resume" if resume else "--fresh"])]


def intent_of(overrides: Sequence[str]) -> tuple[Intent, list[str]]:
    """What the flags among a script's `overrides` ask for, and the overrides without them, with those that a verb has
    told the script. Raises `UsageError` for both flags.
    """
    given = [*overrides, *keys_told(os.environ)]
    os.environ.pop(EXPECTS, None)
    asked = {one for one in given if one in FLAGS}
    if len(asked) > 1:
        raise UsageError("--fresh trains a new run, and --resume goes on with the newest one: give one of them")
    return FLAGS[asked.pop()] if asked else "auto", [one for one in given if one not in FLAGS]


def numbered(run_file: RunFile, number: int) -> RunFile:
    """The run file of the run with that number: the first keeps its name and folder."""
    if number == 1:
        return run_file
    run = run_file.run
    directory = None if run.directory is None else f"{run.directory.rstrip('/')}-{number}"
    return msgspec.structs.replace(
        run_file, run=msgspec.structs.replace(run, name=f"{run.name}-{number}", directory=directory)
    )


def _number(run_file: RunFile, intent: Intent) -> int:
    """The number of the run to train. A new one leaves a mark in its folder."""
    *_, free = _numbers(run_file)
    there = list(_numbers(run_file))[:-1]
    if not there:
        return 1
    newest = run_directory(numbered(run_file, there[-1]))
    if intent == "fresh":
        return _begun(run_file, free, f"--fresh leaves {newest} as it is")
    if intent == "resume":
        return there[-1]
    changes = {number: changed(run_file, run_directory(numbered(run_file, number))) for number in there}
    alike = next((number for number in reversed(there) if not changes[number]), None)
    if alike is not None:
        if alike != there[0]:
            say(f"shoal: {run_directory(numbered(run_file, alike))} was started with these keys: it is resumed")
        return alike
    if not is_finished(newest):
        return there[-1]
    why = f"{newest} is finished, and since then {_named(changes[there[-1]])}"
    return _begun(run_file, free, f"{why} (--resume keeps to that run)")


def _begun(run_file: RunFile, number: int, why: str) -> int:
    new = run_directory(numbered(run_file, number))
    _require_local(run_file)
    write_facts(new, {FOLLOWS: run_file.run.name})
    say(f"shoal: {why}: training a new run, {new}")
    return number


def _numbers(run_file: RunFile) -> Iterator[int]:
    """The numbers of the runs that are there, oldest first, and then the first number that is free."""
    number = 1
    while (directory := run_directory(numbered(run_file, number))).exists():
        own = number == 1 or read_facts(directory).get(FOLLOWS) == run_file.run.name
        if own and (number > 1 or (directory / "run.toml").is_file()):
            yield number
        number += 1
    yield number


def is_finished(directory: Path) -> bool:
    """Whether the run in `directory` has come to its end, or to the last step of its run file."""
    if read_facts(directory).get("state") == "finished":
        return True
    recorded = _recorded(directory)
    return recorded is not None and max(Places(directory).steps(), default=0) >= recorded.run.steps


def changed(run_file: RunFile, directory: Path) -> list[str]:
    """What decides the result and is another than when the run in `directory` was started, a part of a sentence each.

    More steps than before are no change: they go on from its last.
    """
    recorded = _recorded(directory)
    if recorded is None:
        return []  # not begun, or of a version whose keys are unknown
    keys = differing_keys([deciding_keys(recorded), deciding_keys(run_file)], left_out=frozenset())
    if recorded.run.steps <= run_file.run.steps:
        keys.pop("run.steps", None)
    said = [f"{key} has changed ({_shown(before)}, now {_shown(now)})" for key, (before, now) in keys.items()]
    return [*said, *_changed_code(read_facts(directory))]


def deciding_keys(run_file: RunFile) -> dict[str, Any]:
    """The keys that decide what a run computes, up to the order of summation, as "table.key"."""
    tables = {name: table for name, table in msgspec.to_builtins(run_file).items() if table is not None}
    keys = differing_keys([tables, {}], left_out=frozenset())
    return {
        key: value
        for key, (value, _) in keys.items()
        if not key.startswith(SAME_RESULT) or key.startswith(STILL_DECIDE)
    }


def _changed_code(facts: dict[str, Any]) -> list[str]:
    """The user's files that the run had imported and that have changed, and the arguments of its script."""
    made_of = facts.get("provenance")
    if not isinstance(made_of, dict) or not isinstance(made_of.get("files"), dict):
        return []
    before = {name: digest for name, digest in made_of["files"].items() if not name.startswith("shoal/")}
    now = file_hashes(before, Path(str(made_of.get("directory"))))
    said = [f"{name} has changed" for name, digest in now.items() if digest is not None and digest != before[name]]
    arguments = made_of.get("arguments")
    if arguments is not None and not is_shoals_command() and arguments != argument_hash(sys.argv[1:]):
        said.append("the script's arguments have changed")
    return said


def _recorded(directory: Path) -> RunFile | None:
    path = directory / "run.toml"
    with suppress(ConfigError):
        return run_file_of(read(path), file=str(path))
    return None


def _require_resumable(run_file: RunFile, intent: Intent) -> None:
    directory = run_directory(run_file)
    if intent == "fresh":
        raise UsageError(
            "--fresh is for ranks that Shoal starts itself on one host: give the new run a name of its own, run.name="
            f"{run_file.run.name}-2"
        )
    if intent == "resume" or not directory.exists() or not is_finished(directory):
        return
    if changes := changed(run_file, directory):
        raise UsageError(
            f"{directory} is finished, and since then {_named(changes)}: set run.name={run_file.run.name}-2 to train a "
            "new run, or give --resume to keep to that one"
        )


def _require_local(run_file: RunFile) -> None:
    """Raises `UsageError` where the old run's checkpoints lie in a store that the new run would resume from."""
    if run_file.checkpoint.remote is not None:
        raise UsageError(
            f"{run_directory(run_file)} is finished, and {run_file.checkpoint.remote} holds its checkpoints: give the "
            "new run a run.name and a checkpoint.remote of its own, or give --resume"
        )


def _require_no_folder_of_runs(run_file: RunFile) -> None:
    """Raises `UsageError` where `run.directory` names the folder in which runs lie, and none that is a run's own."""
    directory = run_directory(run_file)
    if (directory / "run.toml").exists() or not directory.is_dir():
        return
    runs = sorted(path.parent.name for path in directory.glob("*/run.toml") if facts_path(path.parent).exists())
    if runs:
        raise UsageError(
            f"run.directory = {directory} is a folder of runs ({_named(runs)}), and a run has one of its own: set "
            f"run.directory={directory / run_file.run.name}"
        )


def _named(changes: Sequence[str]) -> str:
    more = len(changes) - MOST_NAMED
    return ", ".join(changes[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
