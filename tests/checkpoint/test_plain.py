"""State that JSON would change is refused; the rest is copied."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.progress import plain
from shoal.errors import UsageError
from tests.checkpoint.states import light

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
trees = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@light
@given(trees)
def test_what_json_keeps_is_kept(tree):
    """A copy equals its original, and survives JSON unchanged."""
    assert plain(tree, "state") == tree
    assert json.loads(json.dumps(plain(tree, "state"))) == tree


def test_the_copy_does_not_follow_the_original():
    """Training goes on while the state is written."""
    state = {"cursor": [1, 2]}
    copy = plain(state, "state")
    state["cursor"].append(3)
    assert copy == {"cursor": [1, 2]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"best": float("nan")}, "state.best is nan"),
        ({"a": [0, float("inf")]}, r"state.a\[1\] is inf"),
        ({"seeds": {1: 2}}, "state.seeds has the key 1"),
        ({"rng": torch.zeros(2)}, "state.rng is of type Tensor"),
        ({"n": np.float64(1)}, "state.n is of type float64"),
        ({"b": b"x"}, "state.b is of type bytes"),
    ],
)
def test_what_json_would_change_is_refused_by_name(value, said):
    """The sentence names the value's place."""
    with pytest.raises(UsageError, match=said):
        plain(value, "state")
