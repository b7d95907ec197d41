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

KEY, TWICE = "__key__", "__twice__"


class TarSamples:
    """The format of .tar files. See `blocks.Format`."""

    name = "tar-2"

    def index(self, path: Path) -> np.ndarray:
        """See `blocks.Format.index`; a place is a byte of the file."""
        marks: list[tuple[int, int]] = []
        samples, key, end = 0, None, 0
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            for member, member_end in _members(file, str(path)):
                end = member_end
                if not _is_field(member):
                    continue
                own, _ = key_and_field(member.name)
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
            _require_end(file, end, str(path))
        return np.array([*marks, (samples, end)], dtype=np.int64)

    def read(self, path: Path, start: int, stop: int) -> TarBlock:
        """See `blocks.Format.read`."""
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        samples: list[dict[str, Any]] = []
        stream = BytesIO(content)
        for member, _ in _members(stream, "The tar"):
            if not _is_field(member):
                continue
            key, field = key_and_field(member.name)
            if not samples or samples[-1][KEY] != key:
                samples.append({KEY: key})
            if field in samples[-1]:
                samples[-1][TWICE] = member.name
            stop_at = member.offset_data + member.size
            samples[-1][field] = content[member.offset_data : stop_at]
        return TarBlock(samples, len(content))


class TarBlock:
    """Neighbouring samples: the bytes of their fields."""

    def __init__(self, samples: list[dict[str, Any]], nbytes: int) -> None:
        self.nbytes, self._samples = nbytes, samples

    def record(self, row: int) -> Mapping[str, Any]:
        """The fields of sample `row` as bytes, and its key.

        Raises DataError where the block has fewer samples, or the sample a field twice.
        """
        if row >= len(self._samples):
            raise DataError("the tar's headers have changed since it was indexed: copy the file again.")
        sample = self._samples[row]
        if TWICE in sample:
            raise DataError(f"The member {sample[TWICE]} is there twice: write the tar anew, with keys of their own.")
        return sample


def _require_end(file: IO[bytes], end: int, name: str) -> None:
    """Behind the last member come blocks of zeros and nothing else: a tar that was cut between two members has none,
    and behind those of two tars in one file lies the second one.
    """
    file.seek(end)
    rest = file.read(tarfile.BLOCKSIZE)
    if len(rest) < tarfile.BLOCKSIZE:
        raise DataError(f"{name} ends at byte {end} without a tar's end mark: it was cut short, copy the file again.")
    if rest.strip(b"\0"):
        raise DataError(f"{name} has a damaged header at byte {end}: copy the file again.")
    while rest:
        if rest.strip(b"\0"):
            raise DataError(
                f"{name} goes on behind the end mark of the tar, at byte {end}: it is several tars in one file, give "
                "each a file of its own."
            )
        rest = file.read(BLOCK_BYTES)


def key_and_field(name: str) -> tuple[str, str]:
    """A member's name, cut at the first dot of its last part; the field in lower case, "" where there is no dot."""
    folder, slash, file = name.rpartition("/")
    key, _, field = file.partition(".")
    return f"{folder}{slash}{key}", field.lower()


def _is_field(member: tarfile.TarInfo) -> bool:
    """Whether it is a file, and not one that an operating system hides."""
    return member.isreg() and not member.name.rpartition("/")[2].startswith(".")


def _members(file: IO[bytes], name: str) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """The members in their order, each with the byte at which it ends."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as opened:
            tar: Any = opened  # whose list of members is no part of its types
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile would keep all of them
                yield member, tar.offset
    except tarfile.TarError as error:
        raise DataError(f"{name} is no readable tar without compression ({error}): write it anew.") from error
