"""TOML -> dictionaries -> frozen tables, and back; and `key=value`, the same keys on the command line.

An override has a TOML value, a bare word is a text, and the last one wins. Files come from anywhere, so what is read
is bounded: bytes, depth and the length of dotted keys, for which the time of Python's parser grows with the square.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from shoal.config.check import (
    MOST_PLACES,
    Key,
    Table,
    checked,
    choices_of,
    keys_of,
    places_of,
    shown,
    table_for,
    takes,
    takes_text,
    variants_of,
)
from shoal.errors import ConfigError
from shoal.files import meant, printable, read_file

FILE_LIMIT_BYTES = 1 << 20
MOST_FILES = 4
"""Files of a folder that a message names."""
MAX_DEPTH = 32
"""Tables and lists inside each other; run files need four."""

_WORD = r"(?:[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')"
_LONG_KEY = re.compile(rf"(?<![\w-]){_WORD}(?:[ \t]*+\.[ \t]*+{_WORD}){{{MAX_DEPTH}}}")

T = TypeVar("T", bound=Table)


def load(root: type[T], path: Path, overrides: Iterable[str] = ()) -> T:
    """The tables of the file `path` with the overrides of the command line. Raises `ConfigError`."""
    overrides = tuple(overrides)
    data = apply(read(path), overrides, root)
    return checked(data, root, file=f"{path} with {' '.join(overrides)}" if overrides else str(path))


def read(path: Path) -> dict[str, Any]:
    """The TOML file `path` as plain dictionaries.

    Raises `ConfigError` where it is missing, no regular file, larger than `FILE_LIMIT_BYTES`, or not TOML.
    """
    repair = f"give a TOML file{_beside(path)}"
    content = read_file(path, limit_bytes=FILE_LIMIT_BYTES, error=ConfigError, repair=repair)
    try:
        return parse(content.decode("utf-8-sig"))  # an editor's byte order mark is no reason to refuse a file
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} (0x{content[error.start]:02x})"
        raise ConfigError(f"{printable(path)}: {found} is not UTF-8: save the file in UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{printable(path)}: not a TOML file: {error}") from None


def parse(text: str) -> dict[str, Any]:
    """The dictionaries of a TOML text. Raises `ValueError` if it is no TOML, nested deeper than `MAX_DEPTH`, or holds a
    whole number of more than 64 bits.
    """
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MAX_DEPTH} parts")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's own limit, and a repair that is none here
            raise ValueError("a whole number has thousands of digits") from None
        raise
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        values = [inner for value in level for inner in _inside(value)]
        if any(isinstance(value, int) and value.bit_length() > 64 for value in values):
            raise ValueError("a whole number has more than 64 bits")
        level = [value for value in values if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH}")
    return data


def apply(data: Mapping[str, Any], overrides: Iterable[str], root: type[Table]) -> dict[str, Any]:
    """`data` with every override laid over it. Raises `ConfigError` for a text that is not `key=value`."""
    result = _copied(data)
    for text in overrides:
        path, value = _split(text, root)
        table = result
        for name in path[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"command line: {shown(text)}: '{name}' is a value, not a table; it holds no keys")
        table[path[-1]] = _value(value, _declared(root, path, result))
    return result


def dumps(tables: Table) -> str:
    """The resolved run file: every key written out, keys without a value left out. Loading it gives `tables` again."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(tables)))


def dumps_set(tables: Table) -> str:
    """The run file without what is so by default, for a reader. Loading it gives `tables` again."""
    return tomli_w.dumps(_without_none(_set_keys(tables)))


def tables_of(config: Any) -> dict[str, Any]:
    """The tables of a script's own configuration as plain dictionaries: a mapping or a dataclass, with others inside,
    such as OmegaConf's. Raises `ConfigError` for anything else.
    """
    tables = _in_plain(config)
    if not isinstance(tables, dict):
        raise ConfigError(
            f"the configuration is of the type {type(config).__name__}: give a run file, its tables as dictionaries "
            'such as {"run": {"name": "first"}}, or a dataclass of such tables'
        )
    return tables


def _in_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _in_plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [_in_plain(inner) for inner in value]
    return value


def _set_keys(table: Table) -> dict[str, Any]:
    """The keys of `table` that are not as they are by default, and which variant it is."""
    own = table.__struct_config__
    found: dict[str, Any] = {} if own.tag is None else {str(own.tag_field): own.tag}
    for field in msgspec.structs.fields(table):
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        value = getattr(table, field.name)
        if default is msgspec.NODEFAULT or value != default:
            found[field.encode_name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Table):
        return _set_keys(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else msgspec.to_builtins(value)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _beside(path: Path) -> str:
    """Some of the TOML files beside a missing one that is like none of them, or where recipes are, or the run file of a
    run directory: to be appended to a repair.
    """
    try:
        if (path / "run.toml").is_file():
            return f", such as {printable(path / 'run.toml')}, or the one that this run was started with"
        there = [] if path.exists() or meant(path) else sorted(path.parent.glob("*.toml"))
    except (OSError, ValueError):
        return ""
    if path.parts[:1] == ("recipes",) and not Path("recipes").exists():
        return ", or start it in a copy of Shoal's repository, which has the recipes and their models"
    return f"; there are {', '.join(map(printable, there[:MOST_FILES]))}" if there else ""


def _split(text: str, root: type[Table]) -> tuple[list[str], str]:
    name, equals, value = text.partition("=")
    path = name.strip().split(".")
    if equals and "." in name and name.startswith("-"):
        bare = shown(text.lstrip("-"))
        raise ConfigError(f"command line: {shown(text)} is no override; keys stand without dashes: {bare}")
    if name.startswith("-"):
        raise ConfigError(
            f"command line: {shown(text)} is no key of the run{_key_meant(text, root)}; a script with flags of its own "
            "reads them first, and hands over what is left: flags, keys = parser.parse_known_args()"
        )
    if not equals or not 2 <= len(path) <= MAX_DEPTH or not all(path):
        meant_key = _key_meant(text, root)
        raise ConfigError(
            f"command line: {shown(text)} is no override{meant_key}; write table.key=value, as in run.steps=100"
        )
    if printable(text) != text:
        raise ConfigError(f"command line: '{printable(text)}' is not UTF-8: write it in UTF-8")
    return path, value.strip()


def _key_meant(text: str, root: type[Table]) -> str:
    """Of a key without its table, as in lr=0.1 and --lr: a clause that names the whole one."""
    name, equals, value = text.lstrip("-").partition("=")
    found = places_of(name.strip().replace("-", "_"), root)[:MOST_PLACES]
    return f" (did you mean {' or '.join(f'{key}{equals}{value}' for key in found)}?)" if found else ""


def _value(text: str, declared: Any) -> Any:
    """The TOML value of a text; a bare word is a string, and so is any text where the key takes one and no such value,
    as 5 in run.name=5."""
    try:
        value = parse(f"value = {text}")["value"]
    except ValueError:
        return text
    return text if takes_text(declared, value) and not isinstance(value, str) and not takes(declared, value) else value


def _declared(root: type[Table], path: list[str], data: Mapping[str, Any]) -> Any:
    """The declared type of the key at `path`; None where there is no such key, which is refused later."""
    declared: Any = root
    for name in path:
        table = table_for(declared, data)
        if table is None or name not in (keys := keys_of(table)):
            return None
        declared, inner = keys[name].type, data.get(name)
        data = inner if isinstance(inner, dict) else {}
    return declared


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in data.items()}


def _without_none(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [_without_none(value) for value in data]
    if not isinstance(data, dict):
        return data
    return {name: _without_none(value) for name, value in data.items() if value is not None}


# The reference of the run file, generated from the tables, so that it cannot be out of date.


_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def markdown(root: type[Table], *, title: str) -> str:
    """One section a table, one row a key: name, type, default, sentence."""
    lines = [f"# {title}", ""]
    for key in keys_of(root).values():
        lines += [f"## `[{key.name}]`", ""]
        for kind, table in variants_of(key.type).items():
            lines += _section(key, kind, table)
        for heading, declared, inner in _tables_in(key):
            lines += [f"### `{heading}`", ""]
            for kind, table in variants_of(declared).items():
                lines += _section(inner, kind, table, level="####")
    return "\n".join(lines).rstrip() + "\n"


def _section(key: Key, kind: str | None, table: type[Table], *, level: str = "###") -> Iterator[str]:
    if kind is not None:
        is_default = isinstance(key.default, table)
        yield f'{level} `kind = "{kind}"`{" (default)" if is_default else ""}'
        yield ""
    yield from ((table.__doc__ or "").strip().splitlines()[0], "")
    rows = list(keys_of(table).values())
    if rows:
        yield from ("| key | type | default | |", "|---|---|---|---|")
        yield from (_row(row) for row in rows)
    yield ""


def _tables_in(key: Key) -> list[tuple[str, Any, Key]]:
    """The keys that hold tables themselves, of all of its kinds: the heading, what is declared, and the key."""
    found: dict[str, tuple[str, Any, Key]] = {}
    for table in variants_of(key.type).values():
        for inner in keys_of(table).values():
            name, each = f"[{key.name}.{inner.name}]", _each_of(inner)
            if variants_of(inner.type):
                found.setdefault(inner.name, (name, inner.type, inner))
            elif variants_of(each):
                found.setdefault(inner.name, (f"[{name}]", each, inner))
            elif None in variants_of(named := _by_name(inner)):
                found.setdefault(inner.name, (f"[{key.name}.{inner.name}.NAME]", named, inner))
    return list(found.values())


def _each_of(key: Key) -> Any:
    """What a key that takes several holds; None where it takes one."""
    return typing.get_args(key.type)[0] if typing.get_origin(key.type) in (list, tuple) else None


def _by_name(key: Key) -> Any:
    """What a key that takes tables by name holds; None where it takes others."""
    return typing.get_args(key.type)[1] if typing.get_origin(key.type) is dict else None


def _holds_tables(key: Key) -> bool:
    return bool(variants_of(key.type) or variants_of(_each_of(key)))


def _row(key: Key) -> str:
    if _holds_tables(key):
        words = [f"`{_toml(choice)}`" for choice in choices_of(key.type)]
        kinds = ["tables, see below" if _each_of(key) else "a table, see below"]
        default = f"`{_toml(key.default)}`" if isinstance(key.default, str) else "—"
        return f"| `{key.name}` | {' or '.join([*words, *kinds])} | {default} | {key.sentence} |"
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
    if variants_of(_by_name(key)):
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
