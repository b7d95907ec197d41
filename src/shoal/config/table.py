"""The base of every table of the run file, and the sentence that every key carries.

A table is a frozen struct that refuses keys it does not know. A key is written

    global_samples: Annotated[int, says("Samples in one optimizer step, over all ranks.", ge=1)]

The sentence goes to the generated reference, the bounds are checked before any process starts. Variants of one table
(`kind = "gpt"`) are declared as `class GPT(Table, frozen=True, tag_field="kind", tag="gpt")`; rules between the keys of
one table go to its `__post_init__`, as a `ValueError` whose message says what was found, the rule and the repair.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file. Immutable; equality is by value."""


Positive = Annotated[int, msgspec.Meta(ge=1)]
"""A whole number from 1. Bounds of a key that may be absent stand inside: `Annotated[Positive | None, says("...")]`."""

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


def says(sentence: str, **bounds: Any) -> msgspec.Meta:
    """The description of a key, with `msgspec.Meta`'s bounds (`ge`, `gt`, `le`, `lt`, `min_length`, `pattern`)."""
    return msgspec.Meta(description=sentence, **bounds)
