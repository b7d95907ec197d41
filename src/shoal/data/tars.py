"""WebDataset tars: neighbouring members whose names agree up to the first dot are one sample.

`photos/000017.jpg` and `photos/000017.cls` are the fields `jpg` and `cls` of the sample `photos/000017`. Nothing is
unpacked: the index marks samples by the byte at which they start, one mark for every 64 KiB or larger sample, and a
block is read in one piece. Source: Aizman, Maltby, Breuel, "High Performance I/O For Large Scale Deep Learning",
arXiv:2001.01858.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal.data.blocks import BLOCK_BYTES
from shoal.errors import DataError

KEY = "__key__"


class TarSamples:
    """The format of .tar files. See `blocks.Format`."""

    name = "tar"

    def index(self, path: Path) -> np.ndarray:
        """See `blocks.Format.index`; a place is a byte of the file."""
        marks: list[tuple[int, int]] = []
        samples, key, end = 0, None, 0
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            for member in _members(file, str(path)):
                own, _ = key_and_field(member.name)
                end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                if member.offset_data + member.size > size_bytes:
                    raise DataError(
                        f"{path}, member {member.name}: the file ends within it, {size_bytes} bytes long: copy the "
                        "file again."
                    )
                if own == key:
                    continue
                if not marks or member.offset - marks[-1][1] >= BLOCK_BYTES:
                    marks.append((samples, member.offset))
                samples, key = samples + 1, own
        return np.array([*marks, (samples, end)], dtype=np.int64)

    def read(self, path: Path, start: int, stop: int) -> TarBlock:
        """See `blocks.Format.read`."""
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        samples: list[dict[str, Any]] = []
        stream = BytesIO(content)
        for member in _members(stream, "The tar"):
            key, field = key_and_field(member.name)
            if not samples or samples[-1][KEY] != key:
                samples.append({KEY: key})
            stop_at = member.offset_data + member.size
            samples[-1][field] = content[member.offset_data : stop_at]
        return TarBlock(samples, len(content))


class TarBlock:
    """Neighbouring samples: the bytes of their fields."""

    def __init__(self, samples: list[dict[str, Any]], nbytes: int) -> None:
        self.nbytes, self._samples = nbytes, samples

    def record(self, row: int) -> Mapping[str, Any]:
        """The fields of sample `row` as bytes, and its key. Raises DataError where the block has fewer samples."""
        if row >= len(self._samples):
            raise DataError("the tar's headers have changed since it was indexed: copy the file again.")
        return self._samples[row]


def key_and_field(name: str) -> tuple[str, str]:
    """A member's name, cut at the first dot of its last part; the field in lower case, "" where there is no dot."""
    folder, slash, file = name.rpartition("/")
    key, _, field = file.partition(".")
    return f"{folder}{slash}{key}", field.lower()


def _members(file: IO[bytes], name: str) -> Iterator[tarfile.TarInfo]:
    """The regular members in their order."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as opened:
            tar: Any = opened  # whose list of members is no part of its types
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep all of them
                if member.isreg() and not member.name.rpartition("/")[2].startswith("."):
                    yield member
    except tarfile.TarError as error:
        raise DataError(f"{name} is no readable tar without compression ({error}): write it anew.") from error
