"""Text files as two files of bytes: one to train on, one of held-out files.

Each document ends with byte 0, which no text may hold. What was prepared is kept in the cache (`prepared`) under a
fingerprint of the files' names, sizes and times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shoal.data.corpora import bigram_nats_per_byte, split_by_path
from shoal.data.shard_files import made_once
from shoal.errors import DataError
from shoal.files import read_file

SEPARATOR = 0
VOCABULARY = 256
TRAIN, HELD_OUT, META = "train.bin", "held_out.bin", "meta.json"


class TextMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `meta.json` says. Sizes count the separators; the hash is blake2b of both files' bytes."""

    hash: str
    train_files: int
    train_bytes: int
    held_out_files: int
    held_out_bytes: int
    bigram_nats_per_byte: float | None


@dataclass(frozen=True)
class TextCorpus:
    """A prepared corpus: a folder of the cache, and what is in it. Nothing is held out where `held_out` is None."""

    train: Path
    held_out: Path | None
    meta: TextMeta


def prepare_text(
    files: Sequence[Path], cache: Path, *, root: Path, held_out_fraction: float = 0.05, name: str = "text"
) -> TextCorpus:
    """The corpus of `files`, which lie below `root`; made on the first call, found in `cache` afterwards.

    Raises:
        DataError: a file is missing, empty altogether or holds byte 0; there is nothing left to train on; or the cached
            copy is damaged.
    """
    paths = {path.relative_to(root).as_posix(): path for path in files}
    folder = cache / f"{name}-{_fingerprint(paths, held_out_fraction)}"
    made_once(folder, lambda building: _make(building, paths, held_out_fraction))
    return _opened(folder)


def _fingerprint(paths: dict[str, Path], fraction: float) -> str:
    digest = hashlib.blake2b(f"1 {fraction!r}".encode(), digest_size=12)
    for name, path in sorted(paths.items()):
        if not path.is_file():
            raise DataError(f"There is no text file {path}: correct data.files.")
        status = path.stat()
        digest.update(f"\n{name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def _make(building: Path, paths: dict[str, Path], fraction: float) -> None:
    train, held_out = split_by_path(paths, fraction)
    digest = hashlib.blake2b(digest_size=16)
    train_bytes = _join([paths[name] for name in train], building / TRAIN, digest)
    held_out_bytes = _join([paths[name] for name in held_out], building / HELD_OUT, digest)
    if train_bytes == len(train):
        raise DataError(f"The {len(train)} text files to train on are empty: correct data.files.")
    meta = TextMeta(
        hash=digest.hexdigest(),
        train_files=len(train),
        train_bytes=train_bytes,
        held_out_files=len(held_out),
        held_out_bytes=held_out_bytes,
        bigram_nats_per_byte=_baseline(building) if held_out_bytes > 1 else None,
    )
    (building / META).write_bytes(msgspec.json.encode(meta))


def _join(paths: Sequence[Path], target: Path, digest: hashlib.blake2b) -> int:
    """Writes the documents of `paths` to `target`, each with its separator; the bytes written."""

    def documents() -> Iterator[bytes]:
        for path in paths:
            text = path.read_bytes()
            if SEPARATOR in text:
                raise DataError(f"{path} holds byte 0, which separates documents: it is no text, leave it out.")
            yield text + bytes([SEPARATOR])

    with target.open("wb") as file:
        for piece in documents():
            file.write(piece)
            digest.update(piece)
        written = file.tell()
    digest.update(written.to_bytes(8))
    return written


def _baseline(folder: Path) -> float:
    train, held_out = (np.memmap(folder / name, dtype=np.uint8, mode="r") for name in (TRAIN, HELD_OUT))
    return bigram_nats_per_byte(train, held_out)


def _meta_bytes(folder: Path) -> bytes:
    return read_file(folder / META, limit_bytes=1 << 16, error=DataError, repair="delete that folder")


def _opened(folder: Path) -> TextCorpus:
    try:
        meta = msgspec.json.decode(_meta_bytes(folder), type=TextMeta)
        sizes = tuple((folder / name).stat().st_size for name in (TRAIN, HELD_OUT))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"The cached corpus {folder} is damaged ({error}): delete that folder.") from error
    if sizes != (meta.train_bytes, meta.held_out_bytes):
        raise DataError(f"The cached corpus {folder} has files of other sizes than its meta.json: delete that folder.")
    return TextCorpus(folder / TRAIN, folder / HELD_OUT if meta.held_out_files else None, meta)
