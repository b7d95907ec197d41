"""State that JSON would change is refused, the rest is copied; and the counts of a run are those that are checked."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.manifest import contradiction, plain
from shoal.data.cursor import Cursor
from shoal.engine.state import Progress
from shoal.errors import UsageError
from tests.checkpoint.states import light

texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | texts | st.floats(allow_nan=False, allow_infinity=False)
trees = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=10)


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
        ({"t": "a\udcff"}, "state.t has the text .* which is not Unicode"),
        ({"\ud800": 1}, "state has the text .* which is not Unicode"),
    ],
)
def test_what_json_would_change_is_refused_by_name(value, said):
    """The sentence names the value's place."""
    with pytest.raises(UsageError, match=said):
        plain(value, "state")


def test_the_counts_that_are_checked_are_those_that_the_engine_saves():
    """A state as the engine writes it passes; a sample or a step more in one place, and it is contradicted."""
    progress = Progress({"run.seed": 1})
    for _ in range(3):
        progress.cursor, _ = progress.cursor.take(16)
        progress.step, progress.samples = progress.step + 1, progress.samples + 16
    facts = progress.facts()
    assert contradiction(facts, step=3) is None
    one_less = contradiction(facts | {"cursor": {"committed": [[1, 48]]}}, step=3)
    assert "counts 48 samples, and its data cursor 47" in str(one_less)
    assert "is that of step 3" in str(contradiction(facts, step=4))
    progress.cursor = Cursor(22)
    assert "counts 48 samples, and its data cursor 22" in str(contradiction(progress.facts(), step=3))


def test_imported_weights_have_no_counts():
    """Their state is not a run's, and nothing is asked of it."""
    assert contradiction({"imported": "weights.safetensors"}, step=0) is None
