"""The base of every table of the run file, and the sentence that every key carries.

A table is a frozen struct that refuses keys it does not know. A key is written

    global_samples: Annotated[int, says("Samples in one optimizer step, over all ranks.", ge=1)]

The sentence goes to the generated reference, the bounds are checked before any process starts. Variants of one table
(`kind = "gpt"`) are declared as `class GPT(Table, frozen=True, tag_field="kind", tag="gpt")`; rules between the keys of
one table go to its `__post_init__`, as a `ValueError` whose message says what was found, the rule and the repair.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any, ClassVar

import msgspec


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
    module, _, name = type(table).implemented_by.partition(":")
    if not name:
        raise ValueError(f"{type(table).__name__} names no implementation: set implemented_by")
    return getattr(importlib.import_module(module), name)


Positive = Annotated[int, msgspec.Meta(ge=1)]
"""A whole number from 1. Bounds of a key that may be absent stand inside: `Annotated[Positive | None, says("...")]`."""

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


def says(sentence: str, **bounds: Any) -> msgspec.Meta:
    """The description of a key, with `msgspec.Meta`'s bounds (`ge`, `gt`, `le`, `lt`, `min_length`, `pattern`)."""
    return msgspec.Meta(description=sentence, **bounds)
