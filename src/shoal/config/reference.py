"""The reference of the run file, generated from the tables, so that it cannot be out of date."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from shoal.config.check import Key, choices_of, keys_of, variants_of
from shoal.config.table import Table

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def markdown(root: type[Table], *, title: str) -> str:
    """One section a table, one row a key: name, type, default, sentence."""
    lines = [f"# {title}", ""]
    for key in keys_of(root).values():
        lines += [f"## `[{key.name}]`", ""]
        for kind, table in variants_of(key.type).items():
            lines += _section(key, kind, table)
        for inner in _tables_in(key):
            lines += [f"### `[{key.name}.{inner.name}]`", "", *_section(inner, None, inner.type)]
    return "\n".join(lines).rstrip() + "\n"


def _section(key: Key, kind: str | None, table: type[Table]) -> Iterator[str]:
    if kind is not None:
        is_default = isinstance(key.default, table)
        yield f'### `kind = "{kind}"`{" (default)" if is_default else ""}'
        yield ""
    yield from ((table.__doc__ or "").strip().splitlines()[0], "")
    rows = list(keys_of(table).values())
    if rows:
        yield from ("| key | type | default | |", "|---|---|---|---|")
        yield from (_row(row) for row in rows)
    yield ""


def _tables_in(key: Key) -> list[Key]:
    """Its keys that are tables of one kind, themselves tables of keys."""
    tables = [table for kind, table in variants_of(key.type).items() if kind is None]
    return [inner for table in tables for inner in keys_of(table).values() if _is_table(inner)]


def _is_table(key: Key) -> bool:
    return isinstance(key.type, type) and issubclass(key.type, Table) and key.type.__struct_config__.tag is None


def _row(key: Key) -> str:
    if _is_table(key):
        return f"| `{key.name}` | table, see below | — | {key.sentence} |"
    default = "required" if key.required else "—" if key.default is None else f"`{_toml(key.default)}`"
    return f"| `{key.name}` | {_type(key)} | {default} | {key.sentence} |"


def _type(key: Key) -> str:
    choices = choices_of(key.type)
    if choices:
        others = [o for o in typing.get_args(key.type) if isinstance(o, type) and o is not type(None)]
        named = [str(other) if typing.get_args(other) else other.__name__ for other in others]
        return " or ".join([", ".join(f"`{_toml(choice)}`" for choice in choices), *named])
    bounds = ", ".join(f"{_SIGNS[name]} {value}" for name, value in key.bounds.items() if name in _SIGNS)
    names = [getattr(o, "__name__", str(o)) for o in (typing.get_args(key.type) or (key.type,)) if o is not type(None)]
    if typing.get_origin(key.type) is dict and variants_of(typing.get_args(key.type)[1]):
        return "tables by name"
    if typing.get_origin(key.type) in (list, tuple, dict):
        names = [str(key.type).replace("typing.", "")]
    return " or ".join(dict.fromkeys(names)) + (f" {bounds}" if bounds else "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
