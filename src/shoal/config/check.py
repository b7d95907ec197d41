"""What a table declares, and the refusal of everything else.

`keys_of`, `variants_of`, `table_for` and `choices_of` read a struct: its keys, its variants (`kind = "..."`), its
optional values. No other module asks msgspec how a table is declared. `checked` walks plain dictionaries beside these
declarations and refuses, in one sentence, what does not fit: where, what was found, what is allowed, what is near.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import importlib
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from shoal.errors import ConfigError

# The base of every table of the run file, and the sentence that every key carries.
#
# A table is a frozen struct that refuses keys it does not know. A key is written
#
#     global_samples: Annotated[int, says("Samples in one optimizer step, over all ranks.", ge=1)]
#
# The sentence goes to the generated reference, the bounds are checked before any process starts. Variants of one table
# (`kind = "gpt"`) are declared as `class GPT(Table, frozen=True, tag_field="kind", tag="gpt")`; rules between the keys
# of one table go to its `__post_init__`, as a `ValueError` whose message says what was found, the rule and the repair.


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file. Immutable; equality is by value.

    `implemented_by`: "package.module:name" of what a variant stands for, imported only when it is used, so that tables
    can be read without torch. A new variant is a table that says it, and its module.
    """

    implemented_by: ClassVar[str] = ""

    @property
    def variant(self) -> str:
        """The value of the key that tells variants of a table apart, most often `kind`."""
        return str(type(self).__struct_config__.tag)


def implementation_of(table: Table) -> Any:
    """What `table` stands for. Raises `ValueError` for a table that names nothing."""
    if not (where := type(table).implemented_by):
        raise ValueError(f"{type(table).__name__} names no implementation: set implemented_by")
    return imported(where)


def imported(where: str) -> Any:
    """What stands at "package.module:name", imported when it is asked for."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


Positive = Annotated[int, msgspec.Meta(ge=1)]
"""A whole number from 1. Bounds of a key that may be absent stand inside: `Annotated[Positive | None, says("...")]`."""

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


def says(sentence: str, **bounds: Any) -> msgspec.Meta:
    """The description of a key, with `msgspec.Meta`'s bounds (`ge`, `gt`, `le`, `lt`, `min_length`, `pattern`)."""
    return msgspec.Meta(description=sentence, **bounds)


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


@functools.cache
def keys_of(table: type[Table]) -> Mapping[str, Key]:
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


def places_of(name: str, root: type[Table]) -> list[str]:
    """The keys of the tables of `root` that have this name, as "run.steps", in the order of the tables."""
    return [
        f"{table.name}.{name}"
        for table in keys_of(root).values()
        if any(name in keys_of(variant) for variant in variants_of(table.type).values())
    ]


def choices_of(declared: Any) -> tuple[Any, ...]:
    """The values of a `Literal` (None added where it is optional); empty for any other type."""
    options = list(_options(declared))
    literals = [
        value for option in options if typing.get_origin(option) is Literal for value in typing.get_args(option)
    ]
    return tuple(literals)


def takes_text(declared: Any, value: Any = None) -> bool:
    """Whether a bare word on the command line is this key's value as it stands, though TOML reads `value` in it: of a
    key that takes `true` or some words, `true` is no word.
    """
    options = [value for option in _options(declared) for value in _values(option)]
    words = type(value) not in options and any(isinstance(option, str) for option in options)
    return str in options or words


def takes(declared: Any, value: Any) -> bool:
    """Whether one of the declared types is that of `value`; a whole number may stand for a float."""
    origins = [typing.get_origin(option) or option for option in _options(declared)]
    return type(value) in origins or (type(value) is int and float in origins)


def _values(option: Any) -> tuple[Any, ...]:
    """What a `Literal` allows; any other type itself."""
    return typing.get_args(option) if typing.get_origin(option) is Literal else (option,)


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


MOST_SHOWN, MOST_SHOWN_IN_ALL = 200, 4000
"""Characters of one value, and of a whole sentence, that a message shows of what it refuses."""
MOST_PLACES = 3
"""Tables that a message names for a key that stands in another."""

T = TypeVar("T", bound=Table)


def checked(data: Mapping[str, Any], root: type[T], *, file: str) -> T:
    """`data` as a frozen `root`. Raises `ConfigError` that names the file and the key's path."""
    data = _with_default_kinds(data, root)
    for sentence in _complaints(data, root, (), {}, root):
        raise ConfigError(f"{file}: {_clipped(sentence, MOST_SHOWN_IN_ALL)}")
    try:
        return msgspec.convert(data, root)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_clipped(_explained(str(error), data, root), MOST_SHOWN_IN_ALL)}") from None


def shown(value: Any) -> str:
    """`value` as a message shows it, at most `MOST_SHOWN` characters of it."""
    try:
        text = str(value) if isinstance(value, datetime.date | datetime.time) else repr(value)
        return _clipped(text, MOST_SHOWN)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _with_default_kinds(data: Mapping[str, Any], table: type[Table]) -> dict[str, Any]:
    """Fills in `kind` where a table is given without it and its default is one of the variants."""
    result = dict(data)
    for key in keys_of(table).values():
        inner, default = result.get(key.name), key.default
        if isinstance(inner, dict) and KIND not in inner and isinstance(default, Table):
            tag = type(default).__struct_config__.tag
            result[key.name] = {KIND: tag, **inner} if tag is not None else inner
    return result


def _complaints(
    data: Mapping[str, Any],
    table: type[Table],
    path: tuple[str, ...],
    variants: Mapping[str | None, type[Table]],
    root: type[Table],
) -> Iterator[str]:
    """What is wrong with `data` as a `table`, which is one of `variants`, of a file that holds a `root`."""
    keys = keys_of(table)
    tagged = table.__struct_config__.tag is not None
    for name, value in data.items():
        here = ".".join((*path, name))
        if name == KIND and tagged:
            continue
        if name not in keys:
            where = f"[{'.'.join(path)}]" if path else "the file"
            repair = _of_other_kinds(name, table, variants) or _elsewhere(name, root) or _nearest(name, keys)
            yield f"{here}: unknown key{repair}; {where} may hold: {', '.join(keys)}"
        else:
            yield from _about(value, keys[name], (*path, name), root)
    for key in keys.values():
        if key.required and key.name not in data:
            yield f"{'.'.join((*path, key.name))}: missing; it is required: {key.sentence or 'a table'}"


def _about(value: Any, key: Key, path: tuple[str, ...], root: type[Table]) -> Iterator[str]:
    here = ".".join(path)
    choices, variants = choices_of(key.type), variants_of(key.type)
    if choices and isinstance(value, str):
        if value not in choices:
            yield f"{here}: found {shown(value)}{_nearest(value, choices)}; allowed: {', '.join(map(repr, choices))}"
        return
    if not variants:
        return
    if not isinstance(value, dict):
        yield f"{here}: found {shown(value)}; it is a table, written [{here}]"
        return
    chosen = table_for(key.type, value)
    if chosen is not None:
        yield from _complaints(value, chosen, path, variants, root)
    elif KIND not in value:
        yield f"{here}.{KIND}: missing; it picks the variant: {', '.join(map(repr, variants))}"
    else:
        kind = value[KIND]
        yield f"{here}.{KIND}: found {shown(kind)}{_nearest(kind, variants)}; allowed: {', '.join(map(repr, variants))}"


def _of_other_kinds(name: str, table: type[Table], variants: Mapping[str | None, type[Table]]) -> str:
    kinds = [repr(kind) for kind, other in variants.items() if name in keys_of(other)]
    return f" where kind = {table.__struct_config__.tag!r} (kinds that have it: {', '.join(kinds)})" if kinds else ""


def _elsewhere(name: str, root: type[Table]) -> str:
    found = places_of(name, root)
    return f", did you mean {' or '.join(found[:MOST_PLACES])}?" if found else ""


def _nearest(name: object, known: Iterable[Any]) -> str:
    if not isinstance(name, str) or len(name) > MOST_SHOWN:
        return ""
    names = [str(key) for key in known]
    begun = [key for key in names if key.startswith(name)] if len(name) > 2 else []  # adam: rather adamw than radam
    if name == "gpu" and "cuda" in names:
        return ", did you mean 'cuda'?"
    alike = [key for key in names if key.lower() == name.lower()]
    near = alike or begun or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f", did you mean '{near[0]}'?" if near else ""


def _explained(message: str, data: Mapping[str, Any], root: type[Table]) -> str:
    """msgspec's message, with its JSON path turned round and the value that was found."""
    match = re.fullmatch(r"(?P<rule>.*?) - at `\$\.?(?P<path>.*)`", message, flags=re.DOTALL)
    if match is None:
        return message
    rule, path = match["rule"], match["path"]
    found: Any = data
    names = re.findall(r"[^.\[\]]+", path)
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, dict) or found is None:
        return f"{path}: {rule}"
    plain = f"{rule[0].lower()}{rule[1:].replace('`', '')}"
    return f"{path}: found {shown(found)}; {_rule_in_words(plain, found, _key_at(names, data, root))}"


def _rule_in_words(rule: str, found: Any, key: Key | None) -> str:
    """A rule of msgspec's, with the repair where its own words name none: a pattern, a number written with a unit."""
    if "KiB|MiB" in rule:
        return 'write a size such as "512 MiB", in B, KiB, MiB, GiB or TiB'
    if "matching regex" in rule:
        return (
            f"it is not of the form that this key takes: {key.sentence}" if key is not None else "it has another form"
        )
    if rule.startswith("invalid enum value") and key is not None and choices_of(key.type):
        return f"allowed: {', '.join(map(repr, choices_of(key.type)))}"
    unit = {"bytes": "bytes", "s": "seconds", "ms": "milliseconds"}.get(key.name.rpartition("_")[2]) if key else None
    if unit is not None and isinstance(found, str):
        return f"write the number of {unit} alone, without quotes and unit"
    match = re.fullmatch(r"expected (?P<type>\w+)(?P<bound> (?:[<>]=?) \S+)?(?: \| null)?(?:, got \w+)?", rule)
    if match is not None and match["type"] == "int" and isinstance(found, str) and _WHOLE_NUMBER.fullmatch(found):
        return "it must be a whole number, without quotes and of at most 64 bits"
    if match is None or match["type"] not in _WORDS:
        return rule
    sign, _, bound = (match["bound"] or "").strip().partition(" ")
    return f"it must be {_WORDS[match['type']]}" + (f" {_SIGNS[sign]} {bound.removesuffix('.0')}" if bound else "")


_WHOLE_NUMBER = re.compile(r"[+-]?\d+")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_SIGNS = {">=": "of at least", ">": "above", "<=": "of at most", "<": "below"}


def _key_at(names: list[str], data: Mapping[str, Any], root: type[Table]) -> Key | None:
    """The declared key at a path, None where there is none."""
    declared: Any = root
    key: Key | None = None
    for name in names:
        table = table_for(declared, data)
        key = None if table is None else keys_of(table).get(name)
        if key is None:
            return None
        inner = data.get(name)
        declared, data = key.type, inner if isinstance(inner, dict) else {}
    return key
