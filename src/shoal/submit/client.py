"""Calls of a scheduler's client program (`sbatch`, `kubectl`), bounded in time."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from shoal.errors import EnvironmentFault

CALL_S = 60.0


def call(command: Sequence[str], *, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a client to its end, `text` on its standard input; whatever its exit code.

    Raises `EnvironmentFault` where the program is missing or does not answer within `CALL_S`.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise EnvironmentFault(
            f"{program} is not on the PATH: submitting needs the scheduler's own client; "
            "call shoal on a host that has it, or write the job files alone with --dry-run"
        )
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=CALL_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"{program} did not answer within {CALL_S:.0f} s: see whether the scheduler runs, then try again"
        ) from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What the client complained of, in one line of at most 400 characters."""
    return " ".join((done.stderr or done.stdout).split())[:400] or f"exit code {done.returncode}, without a word"
