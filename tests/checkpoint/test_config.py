"""The `[checkpoint]` table refuses what cannot be meant."""

from __future__ import annotations

import msgspec
import pytest

from shoal.checkpoint.config import CheckpointConfig


def test_defaults_are_those_of_the_saver():
    """An empty table saves every 200 steps, keeps three, and cuts objects as `Saver` does by itself."""
    table = msgspec.convert({}, CheckpointConfig)
    assert (table.every_steps, table.keep, table.object_bytes) == (200, 3, 8 << 20)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"every_steps": -1}, {"object_bytes": 10}, {"kept": 3}, {"keep": "3"}])
def test_impossible_values_are_refused(wrong):
    """Bounds, types and unknown keys."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, CheckpointConfig)
