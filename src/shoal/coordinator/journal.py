"""The journal: every decision of a coordinator, or of another service, on the disk before anybody hears of it.

A file of SQLite in WAL mode with `synchronous = FULL`: a transaction that has returned survives `kill -9` and a power
cut (sqlite.org/wal.html). One service has it open at a time. When a coordinator opens it, it is shortened to what
`snapshot` says of it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from shoal.errors import EnvironmentFault, InUse
from shoal.resilience.events import Decision
from shoal.resilience.faults import JOURNAL, REHEARSAL, Strike, claim, has_struck, read_faults

VERSION = 1
D = TypeVar("D")


class Journal(Generic[D]):
    """Decisions of type `kind`; `version` tells the journals of one service from those of another.

    Raises `InUse` where another process has it open, `EnvironmentFault` where it is no journal of this version, and for
    a disk that is full or broken.
    """

    def __init__(
        self, path: Path, kind: Any = Decision, *, version: int = VERSION, service: str = "coordinator"
    ) -> None:
        self.path, self._version, self._service = path, version, service
        self._decoder = msgspec.json.Decoder(kind)
        try:
            self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def read(self) -> list[D]:
        """All decisions, in order. Raises `EnvironmentFault`."""
        try:
            rows = self._database.execute("SELECT body FROM decisions ORDER BY number").fetchall()
            return [self._decoder.decode(body) for (body,) in rows]
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self._fault(error) from error

    def append(self, decisions: Iterable[D]) -> None:
        """Returns when they are durable. Raises `EnvironmentFault`; then nobody may hear of them."""
        self._write("BEGIN IMMEDIATE", decisions)

    def replace(self, decisions: Sequence[D]) -> None:
        """Puts `decisions` in the place of all that there are. Raises as `append`."""
        self._write("BEGIN IMMEDIATE; DELETE FROM decisions", decisions)

    def close(self) -> None:
        """Lets another process open it."""
        self._database.close()

    def _write(self, begin: str, decisions: Iterable[D]) -> None:
        bodies = [(msgspec.json.encode(decision),) for decision in decisions]
        try:
            for statement in begin.split("; "):
                self._database.execute(statement)
            self._database.executemany("INSERT INTO decisions (body) VALUES (?)", bodies)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def _prepare(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        tables = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version != self._version and (version or tables):
            self._database.close()
            raise EnvironmentFault(
                f"{self.path} is a journal of version {version}, or none: this {self._service} reads version "
                f"{self._version}; give another path"
            )
        self._database.execute("CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        self._database.execute(f"PRAGMA user_version = {self._version}")
        self._database.execute("COMMIT")

    def _fault(self, error: Exception) -> EnvironmentFault:
        if "locked" in str(error):
            return InUse(
                f"{self.path} is open in another process: a journal belongs to one {self._service}; stop that one first"
            )
        return EnvironmentFault(
            f"the journal {self.path} cannot be used ({error}): check the disk, or give another path for a new job"
        )


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
