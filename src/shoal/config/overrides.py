"""`key=value` on the command line: the same keys as in the run file, with TOML values; the last one wins."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.config.shape import keys_of, table_for, takes_text
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
