"""Which turns of a benchmark count on a machine that others use, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quiet_turns import Turn, busy_so_far_s, quiet_median_s


def test_turns_with_neighbours_do_not_count() -> None:
    """Six of nine were slowed down; the median of all would be one of those."""
    loud = [Turn(seconds=0.2 + 0.01 * n, others_s=0.1) for n in range(6)]
    calm = [Turn(seconds=s, others_s=0.0) for s in (0.1, 0.11, 0.12)]
    assert quiet_median_s([*loud, *calm]) == 0.11


def test_a_single_turn_counts() -> None:
    """Whatever it was like."""
    assert quiet_median_s([Turn(seconds=0.3, others_s=0.2)]) == 0.3


def test_idle_and_waiting_for_disks_is_not_busy(tmp_path: Path) -> None:
    """Of the kernel's ticks, a hundred a second; a system that does not tell was never busy."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 500 5 6 7 80 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert busy_so_far_s(stat) == pytest.approx((100 + 20 + 30 + 5 + 6 + 7) / 100)
    assert busy_so_far_s(tmp_path / "nowhere") == 0
