"""The cursor hands out every position once, over restarts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.cursor import Cursor, Interval
from shoal.errors import CorruptCheckpoint


@given(st.lists(st.tuples(st.sampled_from(["step", "save", "restart"]), st.integers(1, 9)), max_size=40))
def test_every_position_is_in_one_step_that_lasts(events: list[tuple[str, int]]):
    """Whatever is taken, saved and restarted: the steps of the state that is left take each position below the next."""
    cursor, taken, saved = Cursor(), list[int](), (json.dumps(Cursor().to_state()), 0)
    for event, number in events:
        if event == "step":
            cursor, interval = cursor.take(number)
            taken += interval.positions().tolist()
        elif event == "save":
            saved = json.dumps(cursor.to_state()), len(taken)
        else:
            cursor, taken = Cursor.from_state(json.loads(saved[0])), taken[: saved[1]]
    assert taken == list(range(cursor.next_position))


def test_the_state_is_small_and_json():
    """A cursor of many steps is one pair of numbers, and of none not even that."""
    cursor = Cursor()
    assert cursor.to_state() == {"committed": []}
    for _ in range(100):
        cursor, _ = cursor.take(7)
    assert json.loads(json.dumps(cursor.to_state())) == {"committed": [[0, 700]]}
    assert cursor == Cursor(700)


def test_refusals():
    """A step of nothing, and an interval that runs backwards."""
    with pytest.raises(ValueError, match="at least 1"):
        Cursor(5).take(0)
    with pytest.raises(ValueError, match="no interval"):
        Interval(3, 2)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"committed": 3},
        {"committed": [[5, 3]]},
        {"committed": [[0, -1]]},
        {"committed": [[1, 8]]},
        {"committed": [[0, 1.5]]},
        {"committed": [[0, True]]},
        {"committed": [[0, 4], [6, 8]]},
    ],
)
def test_a_damaged_state_is_refused(state: dict):
    """A state that no cursor wrote is an error with a repair, not a guess."""
    with pytest.raises(CorruptCheckpoint, match="another checkpoint"):
        Cursor.from_state(state)
