"""Data sets that Hugging Face's `datasets` saved to disk. Nothing is asked of the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import DataError, MissingExtra


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
