"""Packing: how documents of all lengths become samples of at most `sequence` tokens.

`concatenate` cuts windows from the documents end to end, so that samples are full and cross borders. `pad` lets no
sample cross a border: a document is cut into pieces of at most `sequence` tokens, the last one shorter, and nothing of
it is dropped. A document of L tokens has L - 1 targets, hence ceil((L - 1) / sequence) pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.data.config import Packing
from shoal.data.sample import Source
from shoal.data.tokens import Windows
from shoal.errors import DataError


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
        """The samples of at most `sequence` tokens: (inputs, targets), int64."""
        if packing == "concatenate":
            return Windows(self.tokens[: self.ends[-1]], sequence)
        return Pieces(self, sequence)


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
