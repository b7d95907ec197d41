"""The keys of run files side by side: which of them differ between runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

OF_THE_RUN_ITSELF = frozenset({"run.name", "run.directory"})
"""Keys that name a run, and differ between any two runs; a run that is started again can have another name."""


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Tables without nesting: `{"run": {"steps": 9}}` as `{"run.steps": 9}`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def differing_keys(
    runs: Sequence[Mapping[str, Any]], *, left_out: Set[str] = OF_THE_RUN_ITSELF
) -> dict[str, list[Any]]:
    """The keys that are not the same in all runs, with each run's value (None where it has none), sorted by key."""
    tables = [flat(run) for run in runs]
    keys = sorted(set().union(*tables) - left_out) if tables else []
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}
