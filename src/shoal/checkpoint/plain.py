"""State as plain JSON: a frozen copy in which nothing was changed, or a refusal that names the value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import UsageError


def plain(value: Any, where: str) -> Any:
    """A deep copy of `value` made of JSON's own types; `where` is its name in the message of a `UsageError`.

    JSON would turn NaN into null and the key 1 into "1" without a word, so both are refused; a tuple becomes a list.
    """
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}, which JSON cannot hold: save None or a string in its place")
    if value is None or type(value) in (str, bool, int, float):
        return value
    raise UsageError(
        f"{where} is of type {type(value).__name__}; the state of a checkpoint is JSON: pass tensors as tensors, "
        "and the rest as numbers, strings, lists and mappings"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"{where} has the key {key!r}; the keys of a checkpoint's state are strings: use {str(key)!r}")
    return key
