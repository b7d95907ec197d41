"""Text as token files: the documents of a field or of files, tokenised once and kept in the cache (see `prepared`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from shoal.data.config import TextFiles
from shoal.data.corpora import split_by_path
from shoal.data.dataset import Dataset, Facts, Surroundings, with_sizes
from shoal.data.record_config import Records
from shoal.data.records import RecordSource
from shoal.data.sample import Source, describe
from shoal.data.shard_files import local_file, made_once
from shoal.data.tokens import Documents, TokenFile, smallest_type
from shoal.errors import DataError, MissingExtra
from shoal.files import read_file

# Text to token ids: bytes of UTF-8, or a tokenizer of the package `tokenizers`, from a file.


MOST_BYTES = 2**28
END_BYTE = 0
BYTES = 256


class Tokenizer(Protocol):
    """`vocabulary` ids; equal `version`s give equal tokens."""

    vocabulary: int
    version: str

    def encode(self, text: str) -> np.ndarray:
        """The ids of a document, its end included: int64 [tokens]. Raises DataError for a text that has none."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8, with byte 0 as each document's end."""

    vocabulary, version = BYTES, "bytes"

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        content = text.encode("utf-8", "surrogatepass")
        if END_BYTE in content:
            raise DataError("The text holds byte 0, which ends a document: leave it out.")
        return np.frombuffer(content + bytes([END_BYTE]), dtype=np.uint8).astype(np.int64)


class FileTokenizer:
    """What `tokenizers.Tokenizer.save` wrote, without its special tokens; `end_token` ends each document, if given.

    Raises:
        DataError: the file is missing or no tokenizer, or lacks the end token.
        MissingExtra: `tokenizers` is not installed.
    """

    def __init__(self, path: str | Path, *, end_token: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise MissingExtra("tokenizers", extra="data", purpose="data.tokenizer") from error
        path = Path(path).expanduser()
        content = read_file(path, limit_bytes=MOST_BYTES, error=DataError, repair="correct data.tokenizer")
        try:
            self._tokenizer: Any = Loaded.from_buffer(content)
        except Exception as error:  # tokenizers raises Exception itself
            raise DataError(f"{path} is no tokenizer ({error}): give what Tokenizer.save wrote.") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values(), default=-1) + 1
        self.version = hashlib.blake2b(content + (end_token or "").encode(), digest_size=12).hexdigest()
        self._end: list[int] = []
        if end_token is not None:
            if end_token not in ids:
                raise DataError(f"The tokenizer {path} has no token {end_token!r}: correct data.end_token.")
            self._end = [ids[end_token]]

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids + self._end, dtype=np.int64)


def open_tokenizer(path: str | None, *, end_token: str | None, vocabulary: int | None) -> Tokenizer:
    """The tokenizer of a run file, checked against the model's `vocabulary` (None: unknown).

    Raises:
        DataError: it has more ids than the model; or see `FileTokenizer`.
    """
    tokenizer = ByteTokenizer() if path is None else FileTokenizer(path, end_token=end_token)
    if vocabulary is not None and tokenizer.vocabulary > vocabulary:
        name = "Bytes have" if path is None else f"The tokenizer {path} has"
        raise DataError(
            f"{name} {tokenizer.vocabulary} ids and the model's vocabulary is {vocabulary}: set model.vocabulary = "
            f"{tokenizer.vocabulary} or more."
        )
    return tokenizer


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
