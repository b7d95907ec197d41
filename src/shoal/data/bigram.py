"""The baseline that any model of text must beat: an add-one-smoothed bigram model of bytes.

p(b | a) = (count(a b) + 1) / (count(a) + 256),    loss = -mean of ln p over the held-out pairs, in nats per byte
"""

from __future__ import annotations

import numpy as np

BYTES = 256
CHUNK_BYTES = 2**22  # pairs are counted in pieces, so that a large mapped file is never copied whole


def bigram_counts(text: np.ndarray) -> np.ndarray:
    """How often byte b follows byte a in `text` (uint8 [bytes]): int64 [256, 256], a first."""
    counts = np.zeros(BYTES * BYTES, dtype=np.int64)
    for start in range(0, len(text) - 1, CHUNK_BYTES):
        piece = np.asarray(text[start : start + CHUNK_BYTES + 1], dtype=np.int64)
        counts += np.bincount(piece[:-1] * BYTES + piece[1:], minlength=BYTES * BYTES)
    return counts.reshape(BYTES, BYTES)


def bigram_nats_per_byte(train: np.ndarray, held_out: np.ndarray) -> float:
    """The held-out loss of the model that `train` gives; both uint8 [bytes], `held_out` of two bytes at least.

    Raises:
        ValueError: there is no pair of bytes to score.
    """
    if len(held_out) < 2:
        raise ValueError(f"{len(held_out)} held-out bytes hold no pair: give two or more")
    counts = bigram_counts(train)
    log_p = np.log((counts + 1) / (counts.sum(axis=1, keepdims=True) + BYTES))
    scored = bigram_counts(held_out)
    return float(-(scored * log_p).sum() / scored.sum())
