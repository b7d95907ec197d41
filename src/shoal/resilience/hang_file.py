"""`hang.json` in a run directory: the newest verdict on a hang, from the rank that found it to the launcher."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.files import read_json
from shoal.resilience.hang_verdict import HangVerdict

FILE = "hang.json"
MOST_BYTES = 16 << 20
"""Of stacks of all ranks."""


def write_verdict(directory: Path, verdict: HangVerdict) -> None:
    """Replaces the file, so that a reader finds the whole of it. Raises `OSError`."""
    draft = directory / f".{FILE}"
    draft.write_bytes(msgspec.json.encode(verdict))
    draft.replace(directory / FILE)


def read_verdict(directory: Path, *, since_s: float) -> HangVerdict | None:
    """The verdict that was found after `since_s` (Unix time); None where there is none."""
    path = directory / FILE
    try:
        if path.stat().st_mtime < since_s:
            return None
        return read_json(path, HangVerdict, limit_bytes=MOST_BYTES, error=UsageError, repair="")
    except (OSError, UsageError):
        return None
