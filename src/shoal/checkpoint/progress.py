"""What a checkpoint holds beside tensors: JSON, in which the counts of a run must agree with each other.

A run writes how far it has come as `step`, `skipped`, `samples`, `tokens` and `cursor`. These numbers say one thing
several times: the step is also that of the manifest, and every sample that was counted is a position that the cursor
has committed. A flipped digit breaks one of these rules, or the hash of the manifest, before it can make a run use a
sample twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from shoal.errors import UsageError

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Positions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The positions that a run has used: half-open intervals, ascending, with a gap between any two."""

    committed: list[tuple[Count, Count]]


class _Counts(msgspec.Struct, frozen=True):
    """How far a run has come: optimizer steps taken and skipped, samples and tokens used, and which samples."""

    step: Count
    skipped: Count
    samples: Count
    tokens: Count
    cursor: _Positions


def contradiction(state: Mapping[str, Any], *, step: int) -> str | None:
    """Why `state` cannot be the state of a run after `step` steps; None where it can.

    A state without "identity" is not a run's (imported weights), and nothing is asked of it.
    """
    if "identity" not in state:
        return None
    try:
        counts = msgspec.convert(state, _Counts)
    except msgspec.ValidationError as error:
        return f"its state is not that of a run: {error}"
    if counts.step != step:
        return f"it is the checkpoint of step {step}, and its state is that of step {counts.step}"
    if counts.skipped > step:
        return f"it has skipped {counts.skipped} of {step} steps"
    used, end = 0, -1
    for start, stop in counts.cursor.committed:
        if not end < start < stop:
            return f"its data cursor has the interval [{start}, {stop}) after position {end}"
        used, end = used + stop - start, stop
    if used != counts.samples:
        return f"it counts {counts.samples} samples, and its data cursor {used}"
    return None


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
    if type(value) is str:
        return _text(value, where)
    if value is None or type(value) in (bool, int, float):
        return value
    raise UsageError(
        f"{where} is of type {type(value).__name__}; the state of a checkpoint is JSON: pass tensors as tensors, "
        "and the rest as numbers, strings, lists and mappings"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise UsageError(f"{where} has the key {key!r}; the keys of a checkpoint's state are strings: use {str(key)!r}")
    return _text(key, where)


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{where} has the text {text!r}, which is not Unicode: replace its lone surrogates") from None
    return text
