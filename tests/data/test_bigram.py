"""The baseline is the bigram model's loss, and no more."""

import math
from itertools import pairwise

import numpy as np
import pytest

from shoal.data import corpora as bigram
from shoal.data.corpora import bigram_counts, bigram_nats_per_byte


def naive_loss(train: bytes, held_out: bytes) -> float:
    loss = 0.0
    for a, b in pairwise(held_out):
        pairs = sum(x == a and y == b for x, y in pairwise(train))
        loss -= math.log((pairs + 1) / (train[:-1].count(a) + 256))
    return loss / (len(held_out) - 1)


def test_it_equals_the_definition(monkeypatch: pytest.MonkeyPatch):
    """Counted in pieces or not, the loss is that of the naive double loop."""
    train, held_out = b"the shoal moves as one, whatever its shape", b"as the shape moves, \xff"
    arrays = np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)
    assert bigram_nats_per_byte(*arrays) == pytest.approx(naive_loss(train, held_out), rel=1e-12)
    whole = bigram_counts(arrays[0])
    monkeypatch.setattr(bigram, "CHUNK_BYTES", 5)
    assert np.array_equal(bigram_counts(arrays[0]), whole)
    assert whole.sum() == len(train) - 1


def test_an_untrained_model_is_uniform():
    """Without training text every byte costs ln 256; without pairs there is nothing to score."""
    nothing = np.zeros(0, np.uint8)
    assert bigram_nats_per_byte(nothing, np.arange(9, dtype=np.uint8)) == pytest.approx(math.log(256))
    with pytest.raises(ValueError, match="no pair"):
        bigram_nats_per_byte(nothing, nothing)
