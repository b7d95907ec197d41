"""Reading a run file: its tables, the command line's overrides, keys of earlier versions, and the rules between tables.

Imports no torch, so that an impossible run is refused before any process starts. `python -m shoal.runfile.load
docs/reference/run-file.md` writes the reference anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.config.check import checked, keys_of, shown, table_for
from shoal.config.load import apply, markdown, read
from shoal.data.config import Mixture
from shoal.data.record_config import Reading
from shoal.errors import ConfigError
from shoal.runfile.rules import check_across
from shoal.runfile.run_file import RunFile

_RENAMED = {
    "sync.transport": "wire.transport",
    "sync.algorithm": "wire.algorithm",
    "observe.check_collectives": "wire.check_collectives",
    "run.timeout_s": "wire.timeout_s",
    "sync.bucket_bytes": "gradients.bucket_bytes",
    "sync.first_bucket_bytes": "gradients.first_bucket_bytes",
    "sync.bucket": "gradients.bucket",
    "sync.schedule": "gradients.schedule",
    "sync.partition_bytes": "gradients.partition_bytes",
    "sync.credit_bytes": "gradients.credit_bytes",
    "elastic.preemption_file": "run.preemption_file",
    "elastic.preemption_url": "run.preemption_url",
    "data.weights": "data.loss_weights",
}
"""Keys of earlier versions and where they are now. They still work; `renamed_keys` names them."""


def load_run(path: Path, overrides: Iterable[str] = ()) -> RunFile:
    """The run file with its overrides, checked table by table and across tables. Raises `ConfigError`.

    Keys of earlier versions are read, and named on standard error.
    """
    if path.suffix == ".py" and path.is_file():
        raise ConfigError(
            f"{path} is a script, and this takes a run file: shoal train, verify, profile, rehearse and submit take "
            "scripts; to plan, name its model in a run file (model.build)"
        )
    overrides = tuple(overrides)
    file = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return run_file_of(apply(read(path), overrides, RunFile), file=file)


def run_file_of(tables: Mapping[str, Any], *, file: str) -> RunFile:
    """The run file that these tables make; `file` is its name in messages. Raises `ConfigError`."""
    tables, old_keys = renamed_keys(tables)
    if old_keys:
        keys = ", ".join(f"{old} is now {new}" for old, new in old_keys.items())
        print(f"shoal: {file}: {keys}; the old name still works", file=sys.stderr, flush=True)
    run_file = checked(tables, RunFile, file=file)
    if isinstance(run_file.data, Mixture):
        run_file = msgspec.structs.replace(run_file, data=_read_as_one(run_file.data, tables["data"], file=file))
    check_across(run_file, file=file)
    return run_file


OF_ONE_SOURCE = ("stratify", "subset", "weights", "group_by_length")
"""Keys that order or choose the samples of one source."""


def _read_as_one(mixture: Mixture, table: Mapping[str, Any], *, file: str) -> Mixture:
    """`mixture`, whose sources have the keys of reading that it has. Raises `ConfigError` where `table`, as it was
    written, gives one of them another.
    """
    whole = {key: getattr(mixture, key) for key in keys_of(Reading)}
    for name, source in mixture.sources.items():
        alone = next((key for key in OF_ONE_SOURCE if getattr(source, key, None) is not None), None)
        if alone is not None:
            raise ConfigError(
                f"{file}: data.sources.{name}.{alone}: a mixture draws from its sources by its own weights; make what "
                "you would choose a source of its own, or leave it out"
            )
        for key, value in whole.items():
            if key in table["sources"][name] and getattr(source, key) != value:
                raise ConfigError(
                    f"{file}: data.sources.{name}.{key}: found {shown(getattr(source, key))}, and a mixture is read as "
                    f"one, with data.{key} = {shown(value)}: set it in [data], or leave it out here"
                )
    sources = {name: msgspec.structs.replace(source, **whole) for name, source in mixture.sources.items()}
    return msgspec.structs.replace(mixture, sources=sources)


def renamed_keys(tables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables with every key under its current name, and the old names that were found. A new name wins."""
    result = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    found: dict[str, str] = {}
    for old, new in _RENAMED.items():
        (old_table, old_key), (new_table, new_key) = old.split("."), new.split(".")
        table, target = result.get(old_table), result.get(new_table, {})
        if (
            isinstance(table, dict)
            and old_key in table
            and isinstance(target, dict)
            and not _is_key(old_table, table, old_key)
        ):
            result[new_table] = {new_key: table.pop(old_key), **target}
            found[old] = new
    return result, found


def _is_key(name: str, table: Mapping[str, Any], key: str) -> bool:
    """Whether the kind that this table is of has such a key today, as gossip has `sync.algorithm`."""
    kind = table_for(keys_of(RunFile)[name].type, table)
    return kind is not None and key in keys_of(kind)


TITLE = "The run file"


def reference() -> str:
    """The whole page."""
    return markdown(RunFile, title=TITLE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
