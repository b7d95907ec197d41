"""Text to token ids: bytes of UTF-8, or a tokenizer of the package `tokenizers`, from a file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.errors import DataError, MissingExtra
from shoal.files import read_file

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
