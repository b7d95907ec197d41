"""The journal: every decision of the coordinator, on the disk before anybody hears of it.

A file of SQLite in WAL mode with `synchronous = FULL`: a transaction that has returned survives `kill -9` and a power
cut (sqlite.org/wal.html). One coordinator has it open at a time. When it is opened it is shortened to what `snapshot`
says of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal.errors import EnvironmentFault, InUse
from shoal.resilience.events import Decision

VERSION = 1
_DECODER = msgspec.json.Decoder(Decision)


class Journal:
    """Raises `InUse` where another process has it open, `EnvironmentFault` where it is no journal of this version, and
    for a disk that is full or broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._prepare()
        except sqlite3.Error as error:
            raise self._fault(error) from error

    def read(self) -> list[Decision]:
        """All decisions, in order. Raises `EnvironmentFault`."""
        try:
            rows = self._database.execute("SELECT body FROM decisions ORDER BY number").fetchall()
            return [_DECODER.decode(body) for (body,) in rows]
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self._fault(error) from error

    def append(self, decisions: Iterable[Decision]) -> None:
        """Returns when they are durable. Raises `EnvironmentFault`; then nobody may hear of them."""
        self._write("BEGIN IMMEDIATE", decisions)

    def replace(self, decisions: Sequence[Decision]) -> None:
        """Puts `decisions` in the place of all that there are. Raises as `append`."""
        self._write("BEGIN IMMEDIATE; DELETE FROM decisions", decisions)

    def close(self) -> None:
        """Lets another process open it."""
        self._database.close()

    def _write(self, begin: str, decisions: Iterable[Decision]) -> None:
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
        if version != VERSION and (version or tables):
            self._database.close()
            raise EnvironmentFault(
                f"{self.path} is a journal of version {version}, or none: this coordinator reads version {VERSION}; "
                "give another path"
            )
        self._database.execute("CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        self._database.execute(f"PRAGMA user_version = {VERSION}")
        self._database.execute("COMMIT")

    def _fault(self, error: Exception) -> EnvironmentFault:
        if "locked" in str(error):
            return InUse(
                f"{self.path} is open in another process: a journal belongs to one coordinator; stop that one first"
            )
        return EnvironmentFault(
            f"the journal {self.path} cannot be used ({error}): check the disk, or give another path for a new job"
        )
