"""`key=value` on the command line: the same keys as in the run file, with TOML values; the last one wins.

Run file -> frozen tables, and back. The one place of this floor that reads a file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from shoal.config.check import checked, keys_of, table_for, takes_text
from shoal.config.table import Table
from shoal.errors import ConfigError


def apply(data: Mapping[str, Any], overrides: Iterable[str], root: type[Table]) -> dict[str, Any]:
    """`data` with every override laid over it. Raises `ConfigError` for a text that is not `key=value`."""
    result = _copied(data)
    for text in overrides:
        path, value = _split(text)
        table = result
        for name in path[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"command line: {text}: '{name}' is a value, not a table; it holds no keys")
        table[path[-1]] = _value(value, _declared(root, path, result))
    return result


def _split(text: str) -> tuple[list[str], str]:
    name, equals, value = text.partition("=")
    path = name.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"command line: '{text}' is no override; write table.key=value, as in run.steps=100")
    return path, value.strip()


def _value(text: str, declared: Any) -> Any:
    """The TOML value of a text; a bare word is a string, and so is any text where the key takes one."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if takes_text(declared) and not isinstance(value, str) else value


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


FILE_LIMIT_BYTES = 1 << 20
T = TypeVar("T", bound=Table)


def load(root: type[T], path: Path, overrides: Iterable[str] = ()) -> T:
    """The tables of `path` with the command line's overrides. Raises `ConfigError`, before anything has started."""
    overrides = tuple(overrides)
    data = apply(read(path), overrides, root)
    return checked(data, root, file=f"{path} with {' '.join(overrides)}" if overrides else str(path))


def read(path: Path) -> dict[str, Any]:
    """The TOML file as plain dictionaries. Raises `ConfigError` where it is missing, too large or not TOML."""
    try:
        if path.stat().st_size > FILE_LIMIT_BYTES:
            raise ConfigError(f"{path}: larger than {FILE_LIMIT_BYTES} bytes; this is no run file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = ", ".join(str(found) for found in sorted(path.parent.glob("*.toml"))[:4])
        raise ConfigError(f"{path}: there is no such file" + (f"; there are {near}" if near else "")) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None


def dumps(tables: Table) -> str:
    """The resolved run file: every key written out, keys without a value left out. Loading it gives `tables` again."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(tables)))


def _without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in data.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in plain.items()}
