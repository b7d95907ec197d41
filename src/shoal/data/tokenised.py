"""Text as token files: the documents of a field or of files, tokenised once and kept in the cache (see `prepared`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.data.config import TextFiles
from shoal.data.corpora import split_by_path
from shoal.data.dataset import Dataset, Facts, Surroundings, with_sizes
from shoal.data.prepared import made_once
from shoal.data.record_config import Records
from shoal.data.records import RecordSource
from shoal.data.sample import Source, describe
from shoal.data.shard_files import local_file
from shoal.data.tokenizer import Tokenizer, open_tokenizer
from shoal.data.tokens import Documents, TokenFile, smallest_type
from shoal.errors import DataError
from shoal.files import read_file

TOKENS, ENDS, META = "tokens.bin", "ends.bin", "meta.json"


class TokenisedMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `meta.json` says: sizes, and a hash (blake2b) of the tokens."""

    hash: str
    documents: int
    tokens: int


def prepare_records(
    config: Records, train: RecordSource, held_out: RecordSource | None, around: Surroundings, *, version: str
) -> Dataset:
    """The field `config.text` of all records, packed as `config` says.

    Raises:
        DataError: a record is damaged or its field is no text, and `config.bad_records` is "stop"; or see `Windows`,
            `Pieces` and `open_tokenizer`.
    """
    tokenizer = open_tokenizer(config.tokenizer, end_token=config.end_token, vocabulary=around.vocabulary)

    def prepared(records: RecordSource, part: str) -> tuple[Documents, TokenisedMeta]:
        documents = _documents(records, str(config.text), tokenizer, skip=config.bad_records == "skip")
        return prepare_documents(
            documents, tokenizer, around.cache, version=f"{version}\0{config.text}\0{config.bad_records}\0{part}"
        )

    documents, meta = prepared(train, "train")
    facts = _facts(meta, tokenizer, "train") | {"train/skipped": len(train) - meta.documents}
    samples = documents.packed(config.packing, sequence=around.sequence)
    if held_out is None:
        return with_sizes(samples, None, facts)
    documents, meta = prepared(held_out, "held_out")
    return with_sizes(
        samples, documents.packed(config.packing, sequence=around.sequence), facts | _facts(meta, tokenizer, "held_out")
    )


def prepare_files(config: TextFiles, files: Sequence[Path], root: Path, around: Surroundings) -> Dataset:
    """Text files through the tokenizer `config` names, each a document; some are held out (`split_by_path`).

    Raises:
        DataError: as `prepare_records`, and where a file is no UTF-8.
    """
    tokenizer = open_tokenizer(config.tokenizer, end_token=config.end_token, vocabulary=around.vocabulary)
    paths = {path.relative_to(root).as_posix(): path for path in files}
    version = "".join(local_file(path).fingerprint for path in files)

    def prepared(names: list[str], part: str) -> tuple[Source, Facts]:
        texts = map(tokenizer.encode, file_texts(paths[name] for name in names))
        own = f"{version}\0{config.held_out_fraction}\0{part}"
        documents, meta = prepare_documents(texts, tokenizer, around.cache, version=own)
        return documents.packed(config.packing, sequence=around.sequence), _facts(meta, tokenizer, part)

    train_names, held_out_names = split_by_path(paths, config.held_out_fraction)
    train, facts = prepared(train_names, "train")
    if not held_out_names:
        return with_sizes(train, None, facts)
    held_out, more = prepared(held_out_names, "held_out")
    return with_sizes(train, held_out, facts | more)


def _facts(meta: TokenisedMeta, tokenizer: Tokenizer, part: str) -> Facts:
    return {
        "vocabulary": tokenizer.vocabulary,
        f"{part}/hash": meta.hash,
        f"{part}/documents": meta.documents,
        f"{part}/tokens": meta.tokens,
    }


def _documents(records: RecordSource, field: str, tokenizer: Tokenizer, *, skip: bool) -> Iterator[np.ndarray]:
    for index in range(len(records)):
        try:
            record = records.record(index)
            try:
                document = tokenizer.encode(_text(record.get(field), field))
            except DataError as error:
                raise DataError(f"{records.where(index)}: {error}") from error
        except DataError:
            if not skip:
                raise
            continue
        yield document


def _text(value: Any, field: str) -> str:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"the field {field!r} is not UTF-8 ({error}): write it anew.") from error
    if not isinstance(value, str):
        raise DataError(f"the field {field!r} is {describe(value)}, not text: mend it.")
    return value


def file_texts(paths: Iterable[Path]) -> Iterator[str]:
    """The text of each file. Raises DataError where one is not UTF-8."""
    for path in paths:
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is no text in UTF-8 ({error}): leave it out.") from error


def prepare_documents(
    documents: Iterable[np.ndarray], tokenizer: Tokenizer, cache: Path, *, version: str
) -> tuple[Documents, TokenisedMeta]:
    """The `documents`, token ids by `tokenizer`; written on the first call for a `version`, found in the cache
    afterwards.

    Raises:
        DataError: there are no documents, or the cached copy is damaged.
    """
    name = hashlib.blake2b(f"1\0{version}\0{tokenizer.version}".encode(), digest_size=12).hexdigest()
    folder = cache / f"tokens-{name}"
    dtype = smallest_type(tokenizer.vocabulary)
    made_once(folder, lambda building: _write(building, documents, np.dtype(dtype).newbyteorder("<")))
    try:
        content = read_file(folder / META, limit_bytes=1 << 16, error=DataError, repair="delete that folder")
        meta = msgspec.json.decode(content, type=TokenisedMeta)
        ends = np.memmap(folder / ENDS, dtype="<i8", mode="r")
        tokens = TokenFile(folder / TOKENS, dtype=dtype, vocabulary=tokenizer.vocabulary).tokens
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"The cached tokens in {folder} are damaged ({error}): delete that folder.") from error
    if (len(ends), len(tokens)) != (meta.documents, meta.tokens):
        raise DataError(f"The cached tokens in {folder} are not as many as meta.json says: delete that folder.")
    return Documents(tokens, ends), meta


def _write(building: Path, encoded: Iterable[np.ndarray], dtype: np.dtype) -> None:
    digest, documents, tokens = hashlib.blake2b(digest_size=16), 0, 0
    with (building / TOKENS).open("wb") as token_file, (building / ENDS).open("wb") as end_file:
        for document in encoded:
            ids = document.astype(dtype)
            digest.update(ids.tobytes())
            token_file.write(ids.tobytes())
            documents, tokens = documents + 1, tokens + len(ids)
            end_file.write(tokens.to_bytes(8, "little"))
    if not tokens:
        raise DataError(f"The {documents} documents hold no tokens: give text to train on.")
    meta = TokenisedMeta(hash=digest.hexdigest(), documents=documents, tokens=tokens)
    (building / META).write_bytes(msgspec.json.encode(meta))
