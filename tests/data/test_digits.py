"""The digits are split once and for all."""

import sys

import numpy as np
import pytest

from shoal.data.corpora import digits
from shoal.errors import MissingExtra

FIRST_HELD_OUT = [4, 2, 7, 1, 3, 4, 9, 4, 1, 3, 3, 5]  # results are compared between runs on this very split


def test_the_split_is_fixed_and_whole():
    """Train and held out are the 1,797 images, apart, a fifth held out, every digit on both sides."""
    pytest.importorskip("sklearn")
    train, held_out = digits()
    assert (len(train), len(held_out)) == (1438, 359)
    assert train.inputs.shape[1:] == (1, 8, 8)
    assert train.inputs.dtype == np.float32
    assert 0 <= train.inputs.min() < train.inputs.max() <= 1
    assert set(train.targets.tolist()) == set(held_out.targets.tolist()) == set(range(10))
    assert held_out.targets[:12].tolist() == FIRST_HELD_OUT
    rows = np.concatenate([train.inputs, held_out.inputs]).reshape(1797, 64)
    assert len(np.unique(rows, axis=0)) == 1797


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    """Without scikit-learn the error says what to install."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"\[vision\]"):
        digits()
