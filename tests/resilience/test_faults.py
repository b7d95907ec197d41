"""Scenarios of a rehearsal on the disk: read as they were written, and each fault claimed once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from shoal.resilience.faults import Fault, Strike, claim, has_struck, read_faults, strikes, write_faults

FAULTS = [Fault(action="kill", label="step/before", rank=1, step=5), Fault(action="stop", label="optimizer/before")]


def test_a_scenario_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All keys survive."""
    write_faults(FAULTS, tmp_path / "scenario")
    assert read_faults(tmp_path / "scenario") == FAULTS


def test_of_many_that_claim_a_fault_one_gets_it(tmp_path: Path) -> None:
    """Processes that start again never strike twice, and the record is that of the one who did."""
    write_faults(FAULTS, tmp_path / "scenario")

    def attempt(pid: int) -> bool:
        return claim(tmp_path / "scenario", 0, Strike(1.0 + pid, 5, 1, pid, "step/before"))

    with ThreadPoolExecutor(8) as pool:
        won = [pid for pid, claimed in enumerate(pool.map(attempt, range(32))) if claimed]
    assert len(won) == 1
    assert [strike.pid for strike in strikes(tmp_path / "scenario")] == won
    assert has_struck(tmp_path / "scenario", 0)
    assert not has_struck(tmp_path / "scenario", 1)


@pytest.mark.parametrize("content", [None, b"not json", b'[{"action": "dance", "label": "x"}]'])
def test_a_scenario_that_is_not_there_is_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    """The variable is named, and who sets it."""
    if content is not None:
        (tmp_path / "scenario.json").write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"SHOAL_REHEARSAL names .* unset the variable"):
        read_faults(tmp_path)
