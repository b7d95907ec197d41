"""What keys a table may hold, read off its struct.

The other modules of this room ask here and nowhere else how a struct, a union of variants (`kind = "..."`) or an
optional value is declared; they then walk plain dictionaries beside the answer.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shoal.config.table import Table

KIND = "kind"
_UNIONS = (typing.Union, types.UnionType)


@dataclass(frozen=True)
class Key:
    """One key of a table: its name, its type without annotations, its sentence, its bounds and its default."""

    name: str
    type: Any
    sentence: str
    bounds: Mapping[str, Any]
    required: bool
    default: Any


def keys_of(table: type[Table]) -> dict[str, Key]:
    """The keys of one table, in the order of their declaration."""
    hints = typing.get_type_hints(table, include_extras=True)
    return {field.name: _key(field, hints[field.name]) for field in msgspec.structs.fields(table)}


def variants_of(declared: Any) -> dict[str | None, type[Table]]:
    """The tables that a declared type admits: `{kind: table}`, `{None: table}` for a table without kinds."""
    found: dict[str | None, type[Table]] = {}
    for option in _options(declared):
        if isinstance(option, type) and issubclass(option, Table):
            found[option.__struct_config__.tag] = option  # type: ignore[index]
    return found


def table_for(declared: Any, data: Mapping[str, Any]) -> type[Table] | None:
    """The table that `data` is meant for, chosen by its `kind`; None where no table or no variant fits."""
    variants = variants_of(declared)
    if None in variants:
        return variants[None]
    kind = data.get(KIND)
    return variants.get(kind) if isinstance(kind, str) else None


def choices_of(declared: Any) -> tuple[Any, ...]:
    """The values of a `Literal` (None added where it is optional); empty for any other type."""
    options = list(_options(declared))
    literals = [
        value for option in options if typing.get_origin(option) is Literal for value in typing.get_args(option)
    ]
    return tuple(literals)


def takes_text(declared: Any) -> bool:
    """Whether a bare word on the command line is this key's value as it stands."""
    return any(option is str or typing.get_origin(option) is Literal for option in _options(declared))


def _key(field: msgspec.structs.FieldInfo, hint: Any) -> Key:
    plain, metas = _without_annotations(hint)
    sentence = next((meta.description for meta in metas if meta.description), "")
    names = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
    bounds = {name: getattr(meta, name) for meta in metas for name in names if getattr(meta, name) is not None}
    default = field.default if field.default is not msgspec.NODEFAULT else None
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return Key(field.name, plain, sentence, bounds, field.required, default)


def _without_annotations(hint: Any) -> tuple[Any, list[msgspec.Meta]]:
    if typing.get_origin(hint) is typing.Annotated:
        plain, *metas = typing.get_args(hint)
        inner, more = _without_annotations(plain)
        return inner, [meta for meta in metas if isinstance(meta, msgspec.Meta)] + more
    if typing.get_origin(hint) in _UNIONS:
        options = [_without_annotations(option) for option in typing.get_args(hint)]
        return functools.reduce(operator.or_, (plain for plain, _ in options)), [
            m for _, metas in options for m in metas
        ]
    return hint, []


def _options(declared: Any) -> Iterator[Any]:
    declared, _ = _without_annotations(declared)
    if typing.get_origin(declared) in _UNIONS:
        for option in typing.get_args(declared):
            yield from _options(option)
    else:
        yield declared
