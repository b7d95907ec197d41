"""The simulator beside the zero-bubble paper's tables, and memory counted along a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulate import BOUNDS
from benchmarks.zero_bubble import MEASURED, PROFILES, bubble_rates, peak_memory, throughput
from shoal.planner.simulate.work import stored_bytes
from shoal.schedules.build import build
from shoal.schedules.timeline import in_flight

PUBLISHED = Path(__file__).parent.parent / "published"
THROUGHPUT, MEMORY = 0.08, 0.10
"""The promises."""
ROWS = "1.5B"
"""Of the measured tables; `benchmarks.simulate` takes all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published tables with the rows of the smallest model."""
    here = tmp_path_factory.mktemp("published")
    for name in (MEASURED, PROFILES):
        head, *lines = (PUBLISHED / name).read_text(encoding="utf-8").splitlines()
        (here / name).write_text(
            "\n".join([head, *[line for line in lines if line.startswith(ROWS)]]), encoding="utf-8"
        )
    return here


def test_bubble_rates_are_the_papers(folder: Path) -> None:
    """1F1B within 0.001; interleaved, ZB-H1, ZB-H2, ZB-1p and ZB-2p within 0.01, from the profiled times."""
    found = list(bubble_rates(folder))
    assert len(found) == 2 * len(BOUNDS)
    assert [one for one in found if abs(one.difference) > BOUNDS[one.schedule]] == []


@pytest.mark.slow
def test_measured_throughput_and_memory_are_met(folder: Path) -> None:
    """Every row within 8 % of the samples per second and 10 % of the peak memory."""
    assert [one for one in throughput(folder) if abs(one.difference) > THROUGHPUT] == []
    assert [one for one in peak_memory(folder) if abs(one.difference) > MEMORY] == []


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_whole_activations_count_as_in_flight(schedule: str) -> None:
    """Where a gradient of weights keeps all of an activation, the peak is the number in flight."""
    table = build(schedule, ranks=4, microbatches=8)
    ones = [1.0] * table.stages
    assert stored_bytes(table, stage_bytes=ones, weight_bytes=ones) == pytest.approx(in_flight(table))


def test_a_split_backward_frees_what_weights_do_not_need() -> None:
    """ZB-H1, rank i from 1: (p - i + 1) M_B + (i - 1) M_W (arXiv:2401.10241, table 2)."""
    table = build("ZB-H1", ranks=4, microbatches=12)
    got = stored_bytes(table, stage_bytes=[1.0] * 4, weight_bytes=[0.25] * 4)
    assert got == pytest.approx([(4 - i + 1) + (i - 1) * 0.25 for i in range(1, 5)])
