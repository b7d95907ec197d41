"""What the benchmarks of compression conclude from their measurements."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compression_auto import held_against
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


def test_a_choice_is_held_against_the_best_of_each_phase_and_of_the_run() -> None:
    """The best of each phase may be another side; the best of the run is one side."""

    def row(side: str, *phases_s: float) -> dict[str, Any]:
        return {"side": side, "phases_s": list(phases_s), "run_s": sum(phases_s)}

    rows = [row("int8", 2.0, 9.0, 2.0), row("power_sgd", 3.0, 5.0, 3.0), row("auto", 2.0, 6.0, 2.0)]
    first, second, third, together, whole = held_against(rows)
    assert [each["value"] for each in (first, second, third)] == [1.0, 1.2, 1.0]
    assert not second["holds"]
    assert together["value"] == pytest.approx(10 / 9, rel=1e-3)
    assert whole["value"] == pytest.approx(11 / 10, rel=1e-3)
    assert whole["holds"]
    assert held_against(rows[:2]) == held_against(rows[2:]) == []
