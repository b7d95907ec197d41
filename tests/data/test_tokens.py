"""Token files are checked before they are trusted, and windows use every token."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import tokens as module
from shoal.data.tokens import TokenFile, Windows, smallest_type
from shoal.errors import DataError


def written(path: Path, tokens: np.ndarray) -> Path:
    tokens.tofile(path)
    return path


@pytest.mark.parametrize(("dtype", "vocabulary"), [("uint8", 256), ("uint16", 257), ("uint32", 2**16 + 1)])
def test_the_type_follows_the_vocabulary(tmp_path: Path, dtype: str, vocabulary: int):
    """The smallest type that holds the vocabulary is assumed, and the ids come back as they were written."""
    ids = np.array([0, vocabulary - 1, 3], dtype=dtype)
    file = TokenFile(written(tmp_path / "t.bin", ids), vocabulary=vocabulary)
    assert smallest_type(vocabulary) == dtype
    assert len(file) == 3
    assert file.tokens.tolist() == ids.tolist()


def test_a_bad_file_is_refused(tmp_path: Path):
    """Missing, empty, cut short, of an unknown type: each has its own sentence."""
    with pytest.raises(DataError, match="There is no token file"):
        TokenFile(tmp_path / "none.bin", vocabulary=10)
    with pytest.raises(DataError, match="is empty"):
        TokenFile(written(tmp_path / "e.bin", np.zeros(0, np.uint8)), vocabulary=10)
    with pytest.raises(DataError, match="3 bytes, which is not a multiple of the 2 bytes of a uint16"):
        TokenFile(written(tmp_path / "o.bin", np.zeros(3, np.uint8)), dtype="uint16")
    with pytest.raises(DataError, match=r"set data\.dtype"):
        TokenFile(written(tmp_path / "t.bin", np.zeros(4, np.uint8)))
    with pytest.raises(DataError, match="2\\^32"):
        smallest_type(2**32 + 1)


def test_an_id_outside_the_vocabulary_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever chunk it hides in, the first bad id is named with its place; the largest good id passes."""
    monkeypatch.setattr(module, "CHECK_TOKENS", 4)
    ids = np.full(11, 6, np.uint16)
    TokenFile(written(tmp_path / "good.bin", ids), dtype="uint16", vocabulary=7)
    ids[9:] = 7
    with pytest.raises(DataError, match="id 7 at token 9, outside the vocabulary of 7"):
        TokenFile(written(tmp_path / "bad.bin", ids), dtype="uint16", vocabulary=7)


@given(length=st.integers(2, 200), sequence=st.integers(1, 40))
def test_windows_target_every_token_once(length: int, sequence: int):
    """Targets follow inputs by one token; side by side they are the tokens, but for an incomplete last window."""
    tokens = np.random.default_rng(length).integers(0, 9, length).astype(np.uint8)
    if length < sequence + 1:
        with pytest.raises(DataError, match="too few"):
            Windows(tokens, sequence)
        return
    windows = Windows(tokens, sequence)
    pairs = [windows[i] for i in range(len(windows))]
    used = len(windows) * sequence
    assert length - 1 - used < sequence
    assert np.concatenate([inputs for inputs, _ in pairs]).tolist() == tokens[:used].tolist()
    assert np.concatenate([targets for _, targets in pairs]).tolist() == tokens[1 : used + 1].tolist()


def test_many_windows_equal_each_one():
    """Reading ids at once gives what reading each gives, in int64, repeats included."""
    windows = Windows(np.arange(100, dtype=np.uint8), 7)
    ids = np.array([3, 0, 13, 3])
    inputs, targets = windows.samples_at(ids)
    assert inputs.dtype == targets.dtype == np.int64
    assert [row.tolist() for row in inputs] == [windows[i][0].tolist() for i in ids]
    assert [row.tolist() for row in targets] == [windows[i][1].tolist() for i in ids]
    with pytest.raises(IndexError):
        windows[len(windows)]
