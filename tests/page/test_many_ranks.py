"""The page of 2,000 ranks finds the slow one and keeps its bounds, whatever the ranks wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.many_ranks import SLOW_RANK, write_many
from shoal.page.live_run import LiveRun

SNAPSHOT_BYTES = 500_000
"""Of a page that a phone loads; 2,000 ranks that each had a row would take ten times as much."""


@pytest.mark.slow
def test_two_thousand_ranks_are_shown_in_bounded_room(tmp_path: Path) -> None:
    """Read in several polls: nothing is left unread, the slow rank is named, and the snapshot stays small."""
    write_many(tmp_path / "run", ranks=2000, steps=12)
    run = LiveRun(tmp_path / "run")
    polls = 0
    while run.poll(most_bytes=4 << 20) and run.snapshot().unread_bytes:
        polls += 1
        assert polls < 20
    assert polls >= 2
    snapshot = run.snapshot()
    assert snapshot.ranks == 2000
    assert [slow.rank for slow in snapshot.slow] == [SLOW_RANK]
    assert snapshot.heat is not None
    assert len(snapshot.heat.rows) == 63
    assert len(msgspec.json.encode(snapshot)) < SNAPSHOT_BYTES
    assert not run.poll()
