"""The table `[observe]`."""

from __future__ import annotations

import msgspec
import pytest

from shoal.observe.config import ObserveConfig


def test_an_empty_table_is_a_whole_one() -> None:
    """Every key has a default: one evaluation at the end, a line a step, a live line and a report."""
    table = msgspec.convert({}, ObserveConfig)
    assert (table.evaluate_every_steps, table.live, table.report) == (0, True, True)


@pytest.mark.parametrize(
    "keys",
    [{"evaluate_samples": 0}, {"sample_bytes": -1}, {"sample_prompt": ""}, {"liev": True}],
)
def test_an_impossible_value_is_refused(keys: dict[str, object]) -> None:
    """Zero lines, no samples, a prompt of nothing and unknown keys do not pass."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(keys, ObserveConfig)
