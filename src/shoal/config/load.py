"""Run file -> frozen tables, and back. The one place of this floor that reads a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from shoal.config.check import checked
from shoal.config.overrides import apply
from shoal.config.table import Table
from shoal.errors import ConfigError

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
