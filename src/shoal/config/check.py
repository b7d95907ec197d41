"""Refuses what the tables do not declare, with a sentence: where, what was found, what is allowed, what is near."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from shoal.config.shape import KIND, Key, choices_of, keys_of, table_for, variants_of
from shoal.config.table import Table
from shoal.errors import ConfigError

T = TypeVar("T", bound=Table)


def checked(data: Mapping[str, Any], root: type[T], *, file: str) -> T:
    """`data` as a frozen `root`. Raises `ConfigError` that names the file and the key's path."""
    data = _with_default_kinds(data, root)
    for sentence in _complaints(data, root, ()):
        raise ConfigError(f"{file}: {sentence}")
    try:
        return msgspec.convert(data, root)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_explained(str(error), data)}") from None


def _with_default_kinds(data: Mapping[str, Any], table: type[Table]) -> dict[str, Any]:
    """Fills in `kind` where a table is given without it and its default is one of the variants."""
    result = dict(data)
    for key in keys_of(table).values():
        inner, default = result.get(key.name), key.default
        if isinstance(inner, dict) and KIND not in inner and isinstance(default, Table):
            tag = type(default).__struct_config__.tag
            result[key.name] = {KIND: tag, **inner} if tag is not None else inner
    return result


def _complaints(data: Mapping[str, Any], table: type[Table], path: tuple[str, ...]) -> Iterator[str]:
    keys = keys_of(table)
    tagged = table.__struct_config__.tag is not None
    for name, value in data.items():
        here = ".".join((*path, name))
        if name == KIND and tagged:
            continue
        if name not in keys:
            where = f"[{'.'.join(path)}]" if path else "the run file"
            yield f"{here}: unknown key{_nearest(name, keys)}; {where} may hold: {', '.join(keys)}"
        else:
            yield from _about(value, keys[name], (*path, name))
    for key in keys.values():
        if key.required and key.name not in data:
            yield f"{'.'.join((*path, key.name))}: missing; it is required: {key.sentence or 'a table'}"


def _about(value: Any, key: Key, path: tuple[str, ...]) -> Iterator[str]:
    here = ".".join(path)
    choices, variants = choices_of(key.type), variants_of(key.type)
    if choices and isinstance(value, str) and value not in choices:
        yield f"{here}: found {value!r}{_nearest(value, choices)}; allowed: {', '.join(map(repr, choices))}"
    if not variants:
        return
    if not isinstance(value, dict):
        yield f"{here}: found {value!r}; it is a table, written [{here}]"
        return
    chosen = table_for(key.type, value)
    if chosen is not None:
        yield from _complaints(value, chosen, path)
    elif KIND not in value:
        yield f"{here}.{KIND}: missing; it picks the variant: {', '.join(map(repr, variants))}"
    else:
        kind = value[KIND]
        yield f"{here}.{KIND}: found {kind!r}{_nearest(str(kind), variants)}; allowed: {', '.join(map(repr, variants))}"


def _nearest(name: str, known: Iterable[Any]) -> str:
    near = difflib.get_close_matches(name, [str(key) for key in known], n=1, cutoff=0.6)
    return f", did you mean '{near[0]}'?" if near else ""


def _explained(message: str, data: Mapping[str, Any]) -> str:
    """msgspec's message, with its JSON path turned round and the value that was found."""
    match = re.fullmatch(r"(?P<rule>.*?) - at `\$\.?(?P<path>.*)`", message, flags=re.DOTALL)
    if match is None:
        return message
    rule, path = match["rule"], match["path"]
    found: Any = data
    for name in re.findall(r"[^.\[\]]+", path):
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, dict) or found is None:
        return f"{path}: {rule}"
    return f"{path}: found {found!r}; {rule[0].lower()}{rule[1:].replace('`', '')}"
