"""What went over the wire: calls, bytes and exposed seconds of every collective, since the last look."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One kind of collective: how often, how many bytes this rank sent, how long its caller stood still for it."""

    calls: int = 0
    bytes_sent: int = 0
    exposed_s: float = 0.0

    def __add__(self, other: Entry) -> Entry:
        return Entry(self.calls + other.calls, self.bytes_sent + other.bytes_sent, self.exposed_s + other.exposed_s)


@dataclass
class Ledger:
    """Adds up entries by operation. `take` returns what has come together and starts again from nothing."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def sent(self, operation: str, bytes_sent: int) -> None:
        """One call that puts `bytes_sent` on the wire."""
        self._add(operation, Entry(calls=1, bytes_sent=bytes_sent))

    def waited(self, operation: str, exposed_s: float) -> None:
        """The caller stood still for `exposed_s` seconds."""
        self._add(operation, Entry(exposed_s=exposed_s))

    def total(self) -> Entry:
        """The sum over all operations."""
        return sum(self.entries.values(), Entry())

    def take(self) -> dict[str, Entry]:
        """The entries since the last call of this method."""
        taken, self.entries = self.entries, {}
        return taken

    def _add(self, operation: str, entry: Entry) -> None:
        self.entries[operation] = self.entries.get(operation, Entry()) + entry
