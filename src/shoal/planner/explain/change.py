"""One thing done differently, and what becomes of the step and of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was changed; seconds of the step and bytes of the fullest rank afterwards, and whether that fits."""

    what: str
    step_s: float
    memory_bytes: float
    fits: bool
