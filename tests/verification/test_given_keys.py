"""A key means the same in a dictionary, in a run file and on the command line, whatever objects a script passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli_w
from torch import nn

from shoal.api import _resolved
from shoal.config.check import Key, choices_of, keys_of, variants_of
from shoal.errors import ConfigError, ShoalError
from shoal.own_loop.start import run_file_of_loop
from shoal.runfile.run_file import RunFile

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "keys", "steps": 4},
    "batch": {"global_samples": 8},
}
OBJECTS = {"model": nn.Linear(2, 2), "data": [(0, 0)] * 8, "loss": nn.MSELoss(reduction="none")}
OF_OBJECTS = {*OBJECTS}


def values(key: Key) -> list[Any]:
    """Values of a key's type: not its default, and within its bounds as far as they are declared."""
    found: list[Any] = [choice for choice in choices_of(key.type) if choice != key.default]
    for option in get_args(key.type) if get_origin(key.type) is not Literal else ():
        found += values(Key(key.name, option, "", key.bounds, False, key.default)) if option is not type(None) else []
    low = key.bounds.get("ge", key.bounds.get("gt", 0))
    by_type = {bool: [not key.default], int: [max(int(low) + 1, 2)], float: [low + 0.5], str: ["some:text"]}
    if isinstance(key.type, type):
        found += by_type.get(key.type, [])
    if get_origin(key.type) is list:
        found.append(["some:text"])
    if get_origin(key.type) is dict:
        found.append({"some": "column"})
    return found


def cases() -> Iterator[tuple[str, str, str | None, Any]]:
    """Table, key, kind and value: every key of every table that a script may set beside its objects."""
    for table in keys_of(RunFile).values():
        for kind, keys in variants_of(table.type).items():
            if table.name in OF_OBJECTS and kind != "python":
                continue
            for key in keys_of(keys).values():
                if (key.name in ("build", "arguments") and table.name in OF_OBJECTS) or key.name in BASE.get(
                    table.name, {}
                ):
                    continue
                for value in values(key)[:2]:
                    yield table.name, key.name, kind, value


CASES = [*cases()]


def outcome(call: Any) -> RunFile | str:
    """The run file, or why it is refused, without the name of the file."""
    try:
        return call()
    except ShoalError as refusal:
        return str(refusal).partition(": ")[2]


def as_override(table: str, key: str, value: Any) -> str:
    inline = "{ some = 'column' }" if isinstance(value, dict) else tomli_w.dumps({"v": value}).partition("=")[2].strip()
    return f"{table}.{key}={inline}"


def three_ways(
    table: str, key: str, kind: str | None, value: Any, folder: Path
) -> Iterator[tuple[dict, list[str], Path]]:
    """The tables with the key and no override, without it and an override, and the first as a file."""
    kinds = {} if kind is None or table in OF_OBJECTS else {"kind": kind}
    bare = {**BASE, table: {**BASE.get(table, {}), **kinds}} if kinds or table in BASE else BASE
    whole = {**BASE, table: {**BASE.get(table, {}), **kinds, key: value}}
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(whole))
    yield whole, [], path
    yield bare, [as_override(table, key, value)], path


def test_every_table_is_among_the_cases() -> None:
    assert {table for table, *_ in CASES} == {key.name for key in keys_of(RunFile).values()} - {"loss"}
    assert len(CASES) > 250


@pytest.mark.slow
def test_a_key_means_the_same_in_a_dictionary_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    """Every key of every table, with objects for model, data and loss: the same run file, or the same refusal."""
    accepted = []
    for case in CASES:
        (whole, _, path), (bare, overrides, _) = three_ways(*case, tmp_path)
        ways = [(whole, []), (path, []), (bare, overrides)]
        found = [outcome(lambda way=way: _resolved(*way, **OBJECTS)[0]) for way in ways]
        assert found[0] == found[1] == found[2], (case, found)
        accepted += [] if isinstance(found[0], str) else [case[:2]]
    assert {("model", "batch_norm"), ("data", "shuffle"), ("optimizer", "lr"), ("memory", "recompute")} <= {*accepted}
    assert len({*accepted}) > 100


@pytest.mark.parametrize("table", ["model", "data"])
def test_a_key_means_the_same_to_a_loop_of_ones_own(table: str, tmp_path: Path) -> None:
    """Of the two tables whose place the script's objects take."""
    given = ([(0, 0)] * 8, None)
    for case in (case for case in CASES if case[0] == table):
        (whole, _, _), (bare, overrides, _) = three_ways(*case, tmp_path)
        found = [
            outcome(
                lambda way=way: run_file_of_loop(
                    way[0], way[1], file="f", loader=None, data=given, samples=8, epochs=None, steps=None
                )
            )
            for way in [(whole, []), (bare, overrides)]
        ]
        assert found[0] == found[1], case


def test_an_unknown_key_beside_an_object_is_refused() -> None:
    """In a dictionary as on the command line; of a table of another kind, the keys that treat any data stay."""
    for tables, overrides in (({**BASE, "model": {"batch_nrom": "grouped"}}, []), (BASE, ["model.batch_nrom=grouped"])):
        with pytest.raises(ConfigError, match=r"model.batch_nrom.*batch_norm"):
            _resolved(tables, overrides, **OBJECTS)
    run_file, _ = _resolved({**BASE, "data": {"kind": "digits", "shuffle": False}}, [], **OBJECTS)
    assert not run_file.data.shuffle
