"""Which of several failed ranks is the cause, and what the launcher exits with.

One rank's end makes its peers fail, too, often within a millisecond and sometimes before the launcher sees the first.
So ends are ordered by what they are, and only then by time:

    1. errors of a rank's own, and deaths by a signal that the launcher did not send
    2. secondary errors: a collective that lost its peer
    3. deaths by the launcher's own hand
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import Stopped
from shoal.launch.failure import Failure


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended. `code` is negative for a signal; `ours`: a signal that the launcher sent."""

    rank: int
    pid: int
    code: int
    time_ns: int
    ours: bool = False

    @property
    def failed(self) -> bool:
        """Neither done nor stopped after a good checkpoint."""
        return self.code not in (0, Stopped.exit_code)


@dataclass(frozen=True)
class End:
    """A failed rank: its process's end, and the record that it left, if it could."""

    exit: Exit
    failure: Failure | None

    @property
    def order(self) -> tuple[int, int]:
        """The cause sorts first."""
        if self.failure is not None:
            return int(self.failure.secondary), self.failure.time_ns
        return (2 if self.exit.ours else 0), self.exit.time_ns

    @property
    def primary(self) -> bool:
        """Whether the rank failed of itself, as far as it or the kernel says."""
        return self.order[0] == 0


def root_cause(failures: Iterable[Failure], exits: Iterable[Exit]) -> list[End]:
    """The ranks that failed, the cause first."""
    records = {failure.rank: failure for failure in failures}
    ends = [End(end, records.get(end.rank)) for end in exits if end.failed]
    return sorted(ends, key=lambda end: end.order)


def exit_code(exits: Iterable[Exit], ends: list[End]) -> int:
    """The launcher's exit code: the cause's (128 + n for signal n), else 75 if any rank stopped, else 0."""
    if ends:
        code = ends[0].exit.code
        return 128 - code if code < 0 else code
    return Stopped.exit_code if any(end.code == Stopped.exit_code for end in exits) else 0
