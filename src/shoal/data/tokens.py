"""Token files, and their tokens as samples.

A token file is nothing but ids, one after the other, little-endian; it is mapped into memory, never read whole. There
are three ways to make samples of at most `sequence` tokens of it. `Windows` ("concatenate") cuts the documents end to
end: sample i of length S is tokens[i S : i S + S + 1], the first S of them as inputs and the last S as targets, so that
every token but the first is a target once. `Pieces` ("pad") lets no sample cross the border of a document: a document
of L tokens, which has L - 1 targets, becomes ceil((L - 1) / sequence) pieces, the last one shorter. `PackedDocuments`
("documents") cuts windows as the first does, and tells the model which tokens share a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.data.collate import IGNORED
from shoal.data.config import TokenType
from shoal.data.record_config import Packing
from shoal.data.sample import Source
from shoal.errors import DataError

CHECK_TOKENS = 2**24  # ids looked at in one go when a file is checked: 16 to 64 MiB


class TokenFile:
    """A file of token ids, checked once and mapped read-only: `tokens` is a numpy array [tokens].

    `dtype` defaults to the smallest type that holds `vocabulary`; without a vocabulary ids are not checked.

    Raises:
        DataError: the file is missing, empty, not a whole number of ids, or holds ids outside the vocabulary.
    """

    def __init__(self, path: str | Path, *, dtype: TokenType | None = None, vocabulary: int | None = None) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype or smallest_type(vocabulary)).newbyteorder("<")
        self._check_size()
        self.tokens: np.ndarray = np.memmap(self.path, dtype=self.dtype, mode="r")
        if vocabulary is not None:
            self._check_ids(vocabulary)

    def __len__(self) -> int:
        return len(self.tokens)

    def _check_size(self) -> None:
        if not self.path.is_file():
            raise DataError(f"There is no token file {self.path}: correct the path, or make the file.")
        size_bytes = self.path.stat().st_size
        if size_bytes == 0:
            raise DataError(f"The token file {self.path} is empty: it must hold at least two ids.")
        if size_bytes % self.dtype.itemsize:
            raise DataError(
                f"The token file {self.path} has {size_bytes} bytes, which is not a multiple of the "
                f"{self.dtype.itemsize} bytes of a {self.dtype.name}: it is cut short, or data.dtype is another."
            )

    def _check_ids(self, vocabulary: int) -> None:
        for start in range(0, len(self.tokens), CHECK_TOKENS):
            chunk = self.tokens[start : start + CHECK_TOKENS]
            if chunk.max() >= vocabulary:
                at = start + int(np.argmax(chunk >= vocabulary))
                raise DataError(
                    f"The token file {self.path} holds id {int(self.tokens[at])} at token {at}, outside the vocabulary "
                    f"of {vocabulary}: raise the model's vocabulary, or correct data.dtype."
                )


def smallest_type(vocabulary: int | None) -> TokenType:
    """The smallest unsigned type whose values name `vocabulary` ids.

    Raises:
        DataError: no vocabulary is given, or it is above 2^32.
    """
    if vocabulary is None:
        raise DataError("Neither data.dtype nor a vocabulary says how wide a token id is: set data.dtype.")
    if vocabulary > 2**32:
        raise DataError(f"A vocabulary of {vocabulary} does not fit 32-bit ids: it may have 2^32 at most.")
    return "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"


class Windows:
    """Every stretch of `sequence` tokens and the one after it; the tokens of an incomplete last window are left out.

    A sample is (inputs [sequence], targets [sequence]), both int64.

    Raises:
        DataError: there are too few tokens for one window.
    """

    def __init__(self, tokens: np.ndarray, sequence: int) -> None:
        if len(tokens) < sequence + 1:
            raise DataError(
                f"{len(tokens)} tokens are too few for one sample of batch.sequence = {sequence} and the token after "
                "it: shorten batch.sequence, or give more data."
            )
        self._tokens = tokens
        self._sequence = sequence

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._sequence

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._sequence
        window = self._tokens[start : start + self._sequence + 1].astype(np.int64)
        return window[:-1], window[1:]

    def samples_at(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The windows `ids` (int64 [samples]) at once: inputs and targets, int64 [samples, sequence]."""
        places = np.asarray(ids)[:, None] * self._sequence + np.arange(self._sequence + 1)
        windows = self._tokens[places].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokens [tokens] and where each document ends (exclusive, ascending, int64 [documents]).

    Raises:
        DataError: the ends do not ascend, or lie outside the tokens.
    """

    tokens: np.ndarray
    ends: np.ndarray

    def __post_init__(self) -> None:
        bounds = np.concatenate([[0], self.ends])
        if len(bounds) < 2 or np.any(np.diff(bounds) < 0) or bounds[-1] > len(self.tokens):
            raise DataError(
                f"The ends of {len(self.ends)} documents do not ascend within {len(self.tokens)} tokens: there must be "
                "one or more, each the index after its document's last token."
            )

    @staticmethod
    def separated(tokens: np.ndarray, separator: int) -> Documents:
        """Documents that each end with the id `separator`, which belongs to its document; a last one may lack it."""
        ends = np.flatnonzero(tokens == separator) + 1
        if not len(ends) or ends[-1] != len(tokens):
            ends = np.append(ends, len(tokens))
        return Documents(tokens, ends)

    def packed(self, packing: Packing, *, sequence: int) -> Source:
        """The samples of at most `sequence` tokens: (inputs, targets), int64; for "documents" see `PackedDocuments`."""
        if packing == "concatenate":
            return Windows(self.tokens[: self.ends[-1]], sequence)
        return Pieces(self, sequence) if packing == "pad" else PackedDocuments(self, sequence)


class Pieces:
    """Pieces of one document each, of at most `sequence` tokens: (inputs [length], targets [length]), int64.

    Raises:
        DataError: no document has the two tokens that make a sample.
    """

    def __init__(self, documents: Documents, sequence: int) -> None:
        self._tokens = documents.tokens
        self._sequence = sequence
        self._ends = documents.ends
        self._starts = np.concatenate([[0], documents.ends[:-1]])
        targets = np.maximum(self._ends - self._starts - 1, 0)
        self._pieces_before = np.concatenate([[0], np.cumsum(-(-targets // sequence))])
        if not len(self):
            raise DataError("No document has two tokens or more, which one sample takes: check the separator.")

    def __len__(self) -> int:
        return int(self._pieces_before[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        document = int(np.searchsorted(self._pieces_before, index, side="right")) - 1
        start = int(self._starts[document]) + (index - int(self._pieces_before[document])) * self._sequence
        stop = min(start + self._sequence + 1, int(self._ends[document]))
        piece = self._tokens[start:stop].astype(np.int64)
        return piece[:-1], piece[1:]


class PackedDocuments:
    """Windows of `sequence` tokens in which every piece of a document stands by itself.

    The inputs are keywords of the model: `tokens`, `positions`, which restart at 0 with every piece, and `documents`,
    which number the pieces of a window, all int64 [sequence]. Attention must stay within equal `documents`. The last
    token of a document has no target: -100, which the loss leaves out.

    Raises:
        DataError: there are too few tokens for one window.
    """

    def __init__(self, documents: Documents, sequence: int) -> None:
        self._windows = Windows(documents.tokens[: documents.ends[-1]], sequence)
        self._sequence, self._ends = sequence, documents.ends

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        tokens, targets = self._windows[index]
        places = index * self._sequence + np.arange(self._sequence)
        owners = np.searchsorted(self._ends, places, side="right")
        starts = np.flatnonzero(np.diff(owners, prepend=owners[0] - 1))
        pieces = np.searchsorted(starts, np.arange(self._sequence), side="right") - 1
        positions = np.arange(self._sequence) - starts[pieces]
        last = self._ends[owners] == places + 1
        inputs = {"tokens": tokens, "positions": positions, "documents": pieces}
        return inputs, np.where(last, IGNORED, targets)
