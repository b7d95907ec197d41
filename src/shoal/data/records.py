"""Records, which are values by field, as samples: which fields are inputs, targets and weights."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.data.decode import ImageForm, decoded
from shoal.errors import DataError

# What the coming steps need of a remote store is fetched before a reader asks for it.
#
# Which sample stands at a position is known beforehand, and so are the files that the next steps read. A thread walks
# ahead of the step that trains, as far as the files of the steps in between hold so many bytes; other threads fetch
# them, those that are needed first before the others. A request that fails and is made again delays its own file only.
#
# This is a hint: what has not come by the time that a reader needs it, the reader fetches, and an error is the reader's
# to raise.


FETCHERS = 8
MOST_STEPS = 1024
"""Steps that the walk may be ahead, however few bytes they need."""


class Needed(Protocol):
    """Something that samples need, such as a file; hashable, and equal where it is the same thing."""

    @property
    def nbytes(self) -> int: ...

    def fetch(self) -> None:
        """Brings it near, if it is not there yet."""
        ...


@runtime_checkable
class Foresees(Protocol):
    """A source that knows beforehand what its samples need. `ahead_bytes` of that are worth having; 0: none."""

    @property
    def ahead_bytes(self) -> int: ...

    def needed(self, ids: np.ndarray) -> Sequence[Needed]:
        """What the samples `ids` (int64 [samples]) need, each once, what is needed first before the others."""
        ...


class ReadAhead:
    """Fetches what the coming steps need.

    Args:
        source: says what they need.
        steps: the ids of each step, from the next one on; without end.
    """

    def __init__(self, source: Foresees, steps: Iterator[np.ndarray]) -> None:
        self._source, self._steps = source, steps
        self._taken, self._closed = Semaphore(0), Event()
        self._work: SimpleQueue[Needed | None] = SimpleQueue()
        Thread(target=self._walk, name="shoal-read-ahead", daemon=True).start()
        for number in range(FETCHERS):
            Thread(target=self._fetch, name=f"shoal-fetcher-{number}", daemon=True).start()

    def step_taken(self) -> None:
        """A step was handed over, so that what it alone needed makes room for what comes."""
        self._taken.release()

    def close(self) -> None:
        """Ends the threads; one that is fetching ends when it is done. May be called again."""
        self._closed.set()
        self._taken.release()
        for _ in range(FETCHERS):
            self._work.put(None)

    def _walk(self) -> None:
        steps: deque[Sequence[Needed]] = deque()
        users: Counter[Needed] = Counter()
        held_bytes = 0
        for ids in self._steps:
            coming = self._source.needed(ids)
            more_bytes = sum(needed.nbytes for needed in coming if needed not in users)
            while steps and (held_bytes + more_bytes > self._source.ahead_bytes or len(steps) == MOST_STEPS):
                self._taken.acquire()
                for needed in steps.popleft():
                    users[needed] -= 1
                    if not users[needed]:
                        held_bytes -= needed.nbytes
                        del users[needed]
                if self._closed.is_set():
                    return
                more_bytes = sum(needed.nbytes for needed in coming if needed not in users)
            for needed in coming:
                if needed not in users:
                    self._work.put(needed)
            users.update(coming)
            held_bytes += more_bytes
            steps.append(coming)

    def _fetch(self) -> None:
        while (needed := self._work.get()) is not None and not self._closed.is_set():
            with suppress(Exception):  # the reader that needs it asks again, and says what is wrong
                needed.fetch()


class RecordSource(Protocol):
    """Records 0 .. len - 1."""

    def __len__(self) -> int: ...

    def record(self, index: int) -> Mapping[str, Any]:
        """Record `index` by field. Raises DataError where it is damaged, naming file and record."""
        ...

    def where(self, index: int) -> str:
        """The file of record `index`, and its place there."""
        ...


@dataclass(frozen=True)
class Fields:
    """The fields that a sample is made of. One name gives a tensor; several give a dict of them, by their names."""

    inputs: str | list[str]
    targets: str | list[str]
    weights: str | None = None
    images: ImageForm = field(default_factory=ImageForm)

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys([*_listed(self.inputs), *_listed(self.targets), *_listed(self.weights)]))

    def sample(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The sample of `record`: see `sample.parse_sample`. Raises DataError where a field is missing or unusable."""
        sample = {"inputs": self._value(record, self.inputs), "targets": self._value(record, self.targets)}
        if self.weights is not None:
            sample["weights"] = self._value(record, self.weights)
        return sample

    def _value(self, record: Mapping[str, Any], names: str | list[str]) -> Any:
        if isinstance(names, list):
            return {name: self._value(record, name) for name in names}
        if names not in record:
            found = ", ".join(sorted(str(name) for name in record))[:200]
            raise DataError(f"There is no field {names!r}: the record has {found}; correct the run file or the record.")
        return decoded(record[names], names, self.images)


def _listed(names: str | list[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else names


class RecordSamples:
    """The samples of a `RecordSource`.

    `skips_bad` says what a reader does with a sample that raises DataError: leave it out and count it, or stop.
    """

    def __init__(self, records: RecordSource, fields: Fields, *, skips_bad: bool = False) -> None:
        self.records, self.fields, self._skips_bad = records, fields, skips_bad

    def skips(self, index: int) -> bool:
        """Whether sample `index` is left out where it is damaged."""
        return self._skips_bad

    @property
    def ahead_bytes(self) -> int:
        """See `Foresees`."""
        return self.records.ahead_bytes if isinstance(self.records, Foresees) else 0

    def needed(self, ids: np.ndarray) -> Sequence[Needed]:
        """See `Foresees`."""
        return self.records.needed(ids) if isinstance(self.records, Foresees) else ()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records.record(index)
        try:
            return self.fields.sample(record)
        except DataError as error:
            raise DataError(f"{self.records.where(index)}: {error}") from error
