"""Numbers that cannot be right in the unit they are given in, refused with the range that machines have."""

from __future__ import annotations

import math


def check_between(name: str, found: float, low: float, high: float, what: str) -> None:
    """Raises `ValueError`, one sentence, unless `low` <= `found` <= `high`."""
    if math.isfinite(found) and low <= found <= high:
        return
    raise ValueError(
        f"{name} = {found:g}; {what} lies between {low:g} and {high:g}: check the unit, and write it in the one that "
        "the key names"
    )
