"""Files keep their side of the split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.corpora import split_by_path
from shoal.errors import DataError

NAMES = [f"folder/{i}.txt" for i in range(2000)]


@given(st.sets(st.sampled_from(NAMES), min_size=2), st.floats(0, 0.4))
def test_the_sides_are_a_partition(names: set[str], fraction: float):
    """Every file is on one side, and something is held out exactly where that was asked for."""
    try:
        train, held_out = split_by_path(names, fraction)
    except DataError:
        assert len(names) < 10  # chance held out all of a few
        return
    assert sorted(train + held_out) == sorted(names)
    assert bool(held_out) == (fraction > 0)


def test_the_fraction_is_met_and_stays():
    """About the fraction is held out, and a file stays on its side when others leave."""
    _, held_out = split_by_path(NAMES, 0.05)
    assert 60 < len(held_out) < 140
    _, fewer = split_by_path(NAMES[:1000], 0.05)
    assert fewer == [name for name in held_out if name in NAMES[:1000]]


def test_one_file_cannot_be_split():
    """A single file with something to hold out is refused; with nothing held out it trains."""
    with pytest.raises(DataError, match="leave none to train on"):
        split_by_path(["a"], 0.05)
    assert split_by_path(["a"], 0) == (["a"], [])
