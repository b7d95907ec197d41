"""Parquet and Arrow files through pyarrow: a block is a row group, or a record batch. Only the wanted columns are read.

Arrow files are the IPC format with a footer (Feather) or its stream, as Hugging Face's `datasets` write it; both are
mapped into memory, never read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import DataError, MissingExtra


class TableBlock:
    """Rows of an Arrow table."""

    def __init__(self, table: Any) -> None:
        self.nbytes, self._table = table.nbytes, table

    def record(self, row: int) -> Mapping[str, Any]:
        """Row `row`; numbers in lists come as arrays. Raises DataError where a list has a null, which is no number."""
        return {name: _value(self._table.column(name)[row], name) for name in self._table.column_names}


class ParquetFormat:
    """The format of .parquet files, of which `columns` are read. See `blocks.Format`."""

    name = "parquet"

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._parquet = _pyarrow("parquet")

    def index(self, path: Path) -> np.ndarray:
        """See `blocks.Format.index`; a place is the number of a row group."""
        with _named(path, "parquet"), self._parquet.ParquetFile(path) as file:
            _require_columns(path, file.schema_arrow.names, self._columns)
            rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        return _by_counts(rows)

    def read(self, path: Path, start: int, stop: int) -> TableBlock:
        """See `blocks.Format.read`."""
        with _named(path, "parquet"), self._parquet.ParquetFile(path) as file:
            _require_columns(path, file.schema_arrow.names, self._columns)
            return TableBlock(file.read_row_groups(list(range(start, stop)), columns=self._columns, use_threads=False))


class ArrowFormat:
    """The format of .arrow and .feather files, of which `columns` are read. See `blocks.Format`."""

    name = "arrow"

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._arrow = _pyarrow("ipc")

    def index(self, path: Path) -> np.ndarray:
        """See `blocks.Format.index`; a place is the number of a record batch."""
        batches = self._batches(path)
        _require_columns(path, batches[0].schema.names if batches else self._columns, self._columns)
        return _by_counts([batch.num_rows for batch in batches])

    def read(self, path: Path, start: int, stop: int) -> TableBlock:
        """See `blocks.Format.read`."""
        batches = self._batches(path)[start:stop]
        with _named(path, "Arrow"):
            table = _pyarrow("lib").Table.from_batches(batches).select(self._columns)
            table.validate(full=True)
            return TableBlock(table)

    def _batches(self, path: Path) -> list[Any]:
        with _named(path, "Arrow"):
            with path.open("rb") as file:
                has_footer = file.read(6) == b"ARROW1"
            source = _pyarrow("lib").memory_map(str(path))
            if has_footer:
                reader = self._arrow.open_file(source)
                return [reader.get_batch(i) for i in range(reader.num_record_batches)]
            return list(self._arrow.open_stream(source))


def _by_counts(rows: Sequence[int]) -> np.ndarray:
    """The index of blocks 0, 1, 2, ... with these numbers of rows; empty blocks stay out of the way."""
    firsts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    places = np.arange(len(rows) + 1, dtype=np.int64)
    kept = np.append(np.asarray(rows) > 0, True) if len(rows) else np.array([True])
    return np.stack([firsts, places], axis=1)[kept]


def _value(scalar: Any, name: str) -> Any:
    values = getattr(scalar, "values", None)
    if values is None or callable(values) or not scalar.is_valid:  # a struct has a method of that name
        return scalar.as_py()
    if _has_null(values):
        raise DataError(f"The field {name!r} is a list with a null in it: write a number there.")
    try:
        array = values.to_numpy(zero_copy_only=False)
    except (NotImplementedError, ValueError):
        return scalar.as_py()
    return np.asarray(scalar.as_py()) if array.dtype == object else array


def _has_null(values: Any) -> bool:
    """Whether a list, or a list within it, has a null."""
    while values.null_count == 0 and hasattr(values, "flatten") and hasattr(values.type, "value_field"):
        values = values.flatten()
    return values.null_count > 0


def _require_columns(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}: it has {', '.join(found)}; correct the run file.")


def _pyarrow(module: str) -> Any:
    try:
        return import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise MissingExtra("pyarrow", extra="data", purpose="reading parquet and Arrow files") from error


@contextmanager
def _named(path: Path, kind: str) -> Iterator[None]:
    """What pyarrow raises, as a DataError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors derive from ValueError and OSError
        sentence = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read as {kind} ({sentence}): write the file anew.") from error


# Data sets that Hugging Face's `datasets` saved to disk. Nothing is asked of the network.


class SavedDataset:
    """The rows of what `datasets.Dataset.save_to_disk` wrote into `folder`, or of one split of a `DatasetDict`.

    Raises:
        DataError: the folder is missing or not of that form, the split or a column is not there.
        MissingExtra: `datasets` is not installed.
    """

    def __init__(self, folder: str | Path, *, split: str | None, columns: list[str]) -> None:
        try:
            import datasets
        except ImportError as error:
            raise MissingExtra("datasets", extra="data", purpose="data.kind = 'datasets'") from error
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise DataError(f"There is no folder {self.folder}: give one that save_to_disk wrote, data is not fetched.")
        try:
            loaded: Any = datasets.load_from_disk(str(self.folder))
        except Exception as error:  # whatever a damaged folder makes pyarrow, json or datasets raise
            raise DataError(f"{self.folder} is not what save_to_disk writes ({error}): save it anew.") from error
        if isinstance(loaded, dict) != (split is not None):
            found = f"the splits {', '.join(loaded)}" if isinstance(loaded, dict) else "no splits"
            raise DataError(f"{self.folder} holds {found}: set data.split to one of them; leave it out without splits.")
        if split is not None:
            if split not in loaded:
                raise DataError(f"{self.folder} has no split {split!r}: it has {', '.join(loaded)}.")
            loaded = loaded[split]
        missing = [name for name in columns if name not in loaded.column_names]
        if missing:
            raise DataError(
                f"{self.folder} has no column {missing[0]!r}: it has {', '.join(loaded.column_names)}; correct the run "
                "file."
            )
        if not len(loaded):
            raise DataError(f"{self.folder} holds no rows: save a data set that has some.")
        self._rows: Any = loaded.select_columns(columns)

    @property
    def version(self) -> str:
        """What changes when the rows do: `datasets`' own fingerprint of them."""
        return str(self._rows._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, index: int) -> Mapping[str, Any]:
        """Row `index`. Raises DataError where it cannot be decoded."""
        try:
            return self._rows[index]
        except Exception as error:  # Pillow's, pyarrow's and datasets' own
            raise DataError(f"{self.where(index)} cannot be read ({error}): save the data set anew.") from error

    def where(self, index: int) -> str:
        """The folder and the row."""
        return f"{self.folder}, row {index}"
