"""What the benchmarks of compression conclude from their measurements."""

from __future__ import annotations

import pytest

from benchmarks.compression_auto import steps_until_change
from benchmarks.compression_loss import result_of


def test_a_time_to_a_loss_is_that_of_the_side_s_own_steps() -> None:
    """The codec ends higher, at 2.02: without it that is passed after 20 steps, which take DDP 20 of its own."""
    plain = {10: (1.0, 3.0), 20: (2.0, 2.01), 30: (3.0, 2.0)}
    coded = {10: (1.5, 3.1), 20: (3.0, 2.5), 30: (4.5, 2.02)}
    result = result_of(plain, coded, codec="power_sgd", ddp_s=9.0)
    assert [row["steps_to_loss"] for row in result["rows"]] == [20, 30, 20]
    sooner, above = result["checks"]
    assert sooner["value"] == pytest.approx(20 * 9.0 / 4.5, rel=1e-3)
    assert above["value"] == pytest.approx(0.01, rel=1e-3)
    assert sooner["holds"]


@pytest.mark.parametrize(("changed_at", "steps"), [([], 12), ([3], 12), ([14], 2), ([12, 21], 9), ([25], 12)], ids=repr)
def test_a_choice_that_never_changes_has_not_followed(changed_at: list[int], steps: int) -> None:
    """The second of three phases of 12 steps: its last change counts, and no change is as late as can be."""
    assert steps_until_change(changed_at, 12, 12) == steps
