"""Warnings and failures of a run: from the logs of its ranks, from how it ended, and from what its events show."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal import units
from shoal.observe.events import Tail
from shoal.observe.facts import text_of
from shoal.observe.sink import Ending
from shoal.page.rank_times import RankTimes, SlowRank
from shoal.resilience.hang_verdict import HangVerdict
from shoal.standard_output import escape_controls

Level = Literal["failure", "warning", "note"]
MOST = 40
"""Lines of the logs that are kept."""
MOST_CHANGES = 5
"""Changes of the membership that are shown."""
SILENT_STEPS = 20.0
SILENT_S = 60.0
"""A rank that has recorded nothing for this many median steps, and for this long, is reported while the run is on."""
_LINE = re.compile(r"(\S{10,40}Z)  rank (\d{1,9})  (WARNING|ERROR|CRITICAL) *  (.{1,2000})")
_PARTS = {"data": "waiting for data", "forward_backward": "forward and backward", "optimizer": "the optimizer"}


class Notice(msgspec.Struct, frozen=True):
    """A sentence; `at` is a time as the logs write it, "" where it is about now."""

    level: Level
    text: str
    at: str = ""


class LogWarnings:
    """The newest warnings and errors in the logs of all ranks. A sentence that several ranks say counts once."""

    def __init__(self) -> None:
        self._tails: dict[Path, Tail] = {}
        self._found: deque[Notice] = deque(maxlen=MOST)
        self._said: deque[str] = deque(maxlen=MOST)

    def read(self, path: Path, size_bytes: int) -> bool:
        """Takes in what is new in a log; whether that was anything to show."""
        tail = self._tails.setdefault(path, Tail(path))
        if tail.offset == size_bytes:
            return False
        before = len(self._said)
        for line in tail.lines(most_bytes=1 << 20):
            self._take(line.decode("utf-8", errors="replace"))
        return len(self._said) != before

    def notices(self) -> list[Notice]:
        """The newest first."""
        return list(reversed(self._found))

    def _take(self, line: str) -> None:
        match = _LINE.match(line)
        if match is None or match[4] in self._said:
            return
        self._said.append(match[4])
        level: Level = "warning" if match[3] == "WARNING" else "failure"
        self._found.append(Notice(level, f"rank {match[2]}: {escape_controls(match[4])}", match[1]))


def ending_notice(ending: Ending | None, *, state: str) -> list[Notice]:
    """Why the run did not reach its last step."""
    if state == "killed":
        return [Notice("failure", "The run ended without a word: it was killed, or its machine went down. "
                                  "The same command resumes from the newest checkpoint.")]  # fmt: skip
    if ending is None or ending.state == "finished":
        return []
    who = "The run" if ending.rank is None else f"Rank {ending.rank}"
    code = f" with exit code {ending.exit_code}" if ending.exit_code else ""
    cause = f": {escape_controls(ending.cause)}" if ending.cause else ""
    return [Notice("note" if ending.state == "stopped" else "failure", f"{who} {ending.state}{code}{cause}")]


def hang_notices(verdict: HangVerdict | None) -> list[Notice]:
    """Whom the others wait for, where the ranks have found it out."""
    return [] if verdict is None else [Notice("failure", f"The run hangs: {escape_controls(verdict.sentence)}")]


def membership_notices(facts: Mapping[str, Any]) -> list[Notice]:
    """Replicas of an elastic run that were lost or have joined, the newest first."""
    listed = facts.get("membership")
    changes = (
        [text_of(one.get("change")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    )
    return [
        Notice("warning" if " lost " in change else "note", f"{escape_controls(change)}.")
        for change in changes[: -MOST_CHANGES - 1 : -1]
        if change
    ]


def nonfinite_notice(steps: list[int]) -> list[Notice]:
    """How many steps were skipped, and the last of them."""
    if not steps:
        return []
    count = units.plural(len(steps), "step")
    text = f"{count} had a loss or a gradient norm that was not finite, and changed no weight; "
    text += f"the last was step {steps[-1]:,}."
    return [Notice("warning", text)]


def slow_notices(slow: list[SlowRank]) -> list[Notice]:
    """Which rank the others wait for."""
    return [
        Notice(
            "warning",
            f"Rank {one.rank} is slow: its own work takes {units.percent(one.excess)} more than the median rank's, "
            f"most of it in {_PARTS[one.part]}, since about step {one.since_step:,}.",
        )
        for one in slow[:1]
    ]


def silent_notices(times: RankTimes, *, world: int, now_s: float, step_s: float) -> list[Notice]:
    """The ranks, below `world`, that have recorded nothing for long; all of them: the run hangs, or does something else
    than train.
    """
    limit_s = max(SILENT_S, SILENT_STEPS * step_s)
    if not times.ranks or not times.last_time_s.any():
        return []
    last = {
        rank: (float(last_s), int(step))
        for rank, last_s, step in zip(times.ranks, times.last_time_s, times.last_step, strict=True)
        if rank < world
    }
    silent = [rank for rank, (last_s, _) in last.items() if now_s - last_s > limit_s]
    if not silent:
        return []
    if len(silent) < len(last):
        last_s, step = last[silent[0]]
        more = f" and {len(silent) - 1:,} more" if len(silent) > 1 else ""
        waited = units.duration(now_s - last_s)
        text = f"Rank {silent[0]}{more} has recorded nothing for {waited}; its last step was {step:,}."
        return [Notice("failure", text)]
    behind_step = min(step for _, step in last.values())
    behind = [rank for rank, (_, step) in last.items() if step == behind_step]
    text = f"No rank has recorded a step for {units.duration(now_s - max(last_s for last_s, _ in last.values()))}."
    if len(behind) < len(last):
        more = f" and {len(behind) - 1:,} more" if len(behind) > 1 else ""
        text += f" Rank {behind[0]}{more} stands at step {behind_step:,}, the others are ahead: look there first."
    return [Notice("failure", text)]
