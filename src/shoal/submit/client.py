"""Calls of a scheduler's client program (`sbatch`, `kubectl`), bounded in time."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from shoal.errors import EnvironmentFault

CALL_S = 60.0
_LOGGED = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\]")
"""A line of klog, which kubectl writes about each of its attempts."""
_FATAL = ": fatal: "


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
    """What the client complained of, in one line of at most 400 characters: what kubectl logs beside its complaint is
    left out, and what Slurm's clients report before what ended them.
    """
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    told = [line for line in lines if not _LOGGED.match(line)] or lines
    ended = [line for line in told if _FATAL in line] or told
    return " ".join(" ".join(ended).split())[:400] or f"exit code {done.returncode}, without a word"
