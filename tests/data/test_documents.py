"""Packing uses every token, and pads across no border."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.tokens import Documents
from shoal.errors import DataError


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_pieces_are_the_documents(lengths: list[int], sequence: int, ends_open: bool):
    """Each document's targets are its tokens but the first, in order, in pieces of at most `sequence`."""
    documents = [[i + 1] * length + [0] for i, length in enumerate(lengths)]
    joined = np.array([token for document in documents for token in document], np.uint8)
    if ends_open and lengths[-1] > 0:
        joined, documents[-1] = joined[:-1], documents[-1][:-1]
    expected = [document[1:] for document in documents if len(document) > 1]
    if not expected:
        with pytest.raises(DataError, match="two tokens"):
            Documents.separated(joined, 0).packed("pad", sequence=sequence)
        return
    pieces = Documents.separated(joined, 0).packed("pad", sequence=sequence)
    pairs = [pieces[i] for i in range(len(pieces))]
    assert all(1 <= len(inputs) == len(targets) <= sequence for inputs, targets in pairs)
    assert all(inputs[1:].tolist() == targets[:-1].tolist() for inputs, targets in pairs)
    assert all(len(set(inputs.tolist()) - {0}) == 1 and 0 not in inputs for inputs, _ in pairs)
    assert np.concatenate([targets for _, targets in pairs]).tolist() == [t for d in expected for t in d]


def test_concatenation_crosses_borders():
    """Windows are cut from the documents end to end."""
    source = Documents(np.arange(10, dtype=np.uint8), np.array([3, 10])).packed("concatenate", sequence=4)
    assert [source[i][0].tolist() for i in range(len(source))] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("ends", [[], [3, 2], [11]])
def test_impossible_ends_are_refused(ends: list[int]):
    """Ends ascend within the tokens."""
    with pytest.raises(DataError, match="do not ascend"):
        Documents(np.zeros(10, np.uint8), np.array(ends, dtype=np.int64))
