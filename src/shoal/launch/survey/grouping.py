"""Hosts by what they have in common, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

MOST_NAMED = 8


def groups(values: Mapping[str, object]) -> list[tuple[object, list[str]]]:
    """The hosts of each value, the most frequent value first."""
    counted = Counter(values.values())
    return [(value, [name for name, own in values.items() if own == value]) for value, _ in counted.most_common()]


def shown_groups(groups: Iterable[tuple[object, list[str]]], *, nothing: str = "not installed") -> str:
    return "; ".join(f"{nothing if value is None else value} on {listed(names)}" for value, names in groups)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
