"""How a run ended, as `facts.json` keeps it for the report.

    {"state": "failed", "failure": {"cause": "ArithmeticError: a mistake", "rank": 1, "exit_code": 1}}

A run that was killed writes nothing: the report tells it from one that still runs by the lock of the run directory.
Every start sets "state" to "", and a failure counts only beside a state, so that a restart makes an old one void.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import Diverged, ShoalError, Stopped
from shoal.observe.facts import write_facts

State = Literal["finished", "stopped", "diverged", "failed"]
STATES: tuple[State, ...] = ("finished", "stopped", "diverged", "failed")
MAX_CAUSE_CHARACTERS = 4000


@dataclass(frozen=True)
class Ending:
    """How a run ended; `cause`, `rank` and `exit_code` say why, where it did not reach its last step."""

    state: State
    cause: str = ""
    rank: int | None = None
    exit_code: int = 0


def ending_of(error: BaseException | None, *, rank: int | None = None) -> Ending:
    """The ending that an exception stands for, and "finished" for None. `rank` is where it was raised."""
    if error is None:
        return Ending("finished")
    state: State = "stopped" if isinstance(error, Stopped) else "diverged" if isinstance(error, Diverged) else "failed"
    on_purpose = isinstance(error, ShoalError)
    cause = str(error) if on_purpose else f"{type(error).__name__}: {error}".removesuffix(": ")
    return Ending(state, cause, rank, error.exit_code if on_purpose else 1)


def write_ending(run_directory: Path, ending: Ending) -> None:
    """Writes the ending into the facts of the run. Raises `UsageError` where those are damaged, or `OSError`."""
    failure = {"cause": ending.cause[:MAX_CAUSE_CHARACTERS], "rank": ending.rank, "exit_code": ending.exit_code}
    write_facts(run_directory, {"state": ending.state, "failure": None if ending.state == "finished" else failure})


def ending_in(facts: Mapping[str, Any]) -> Ending | None:
    """The ending that facts tell of, or None. What is of the wrong type counts as missing."""
    state: State | None = next((known for known in STATES if facts.get("state") == known), None)
    if state is None:
        return None
    failure = facts.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    cause, rank, exit_code = (failure.get(key) for key in ("cause", "rank", "exit_code"))
    return Ending(
        state,
        cause[:MAX_CAUSE_CHARACTERS] if isinstance(cause, str) else "",
        rank if isinstance(rank, int) and not isinstance(rank, bool) else None,
        exit_code if isinstance(exit_code, int) and not isinstance(exit_code, bool) else 0,
    )
