"""Records, which are values by field, as samples: which fields are inputs, targets and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shoal.data.decode import ImageForm, decoded
from shoal.data.read_ahead import Foresees, Needed
from shoal.errors import DataError


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
        """See `read_ahead.Foresees`."""
        return self.records.ahead_bytes if isinstance(self.records, Foresees) else 0

    def needed(self, ids: np.ndarray) -> Sequence[Needed]:
        """See `read_ahead.Foresees`."""
        return self.records.needed(ids) if isinstance(self.records, Foresees) else ()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records.record(index)
        try:
            return self.fields.sample(record)
        except DataError as error:
            raise DataError(f"{self.records.where(index)}: {error}") from error
