"""The journal of a rehearsed run's coordinator, which fails where a fault of the scenario says so."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shoal.coordinator.journal import Journal
from shoal.errors import EnvironmentFault
from shoal.resilience.events import Decision
from shoal.resilience.faults import JOURNAL, REHEARSAL, Strike, claim, has_struck, read_faults


def journal_of(environ: Mapping[str, str]) -> Callable[[Path], Journal]:
    """What opens the journal: a plain one, but in a rehearsal."""
    folder = environ.get(REHEARSAL)
    return Journal if not folder else lambda path: RehearsedJournal(path, Path(folder))


class RehearsedJournal(Journal):
    """Fails at the passing that a fault with the label `JOURNAL` names, once in the whole run."""

    def __init__(self, path: Path, scenario: Path) -> None:
        super().__init__(path)
        self._scenario, self._faults, self._passed = scenario, read_faults(scenario), 0

    def append(self, decisions: Iterable[Decision]) -> None:
        """See `Journal`."""
        self._passed += 1
        for number, fault in enumerate(self._faults):
            due = fault.label == JOURNAL and fault.passing == self._passed
            strike = Strike(time.time(), fault.step, fault.rank, os.getpid(), JOURNAL)
            if due and not has_struck(self._scenario, number) and claim(self._scenario, number, strike):
                raise EnvironmentFault(f"the journal {self.path} cannot be used ({os.strerror(errno.ENOSPC)})")
        super().append(decisions)
