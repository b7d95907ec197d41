"""The benchmark of shared memory: any number of ranks, the bound of each collective, and the picture."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.wire import LEAST_WORK, Case, cases, row_of, scratch_of
from benchmarks.wire_picture import size_name, write_wire_picture
from shoal.comm.collective import GroupCollective

ROOT = Path(__file__).parents[2]


def test_what_is_cut_into_parts_divides_by_the_ranks() -> None:
    """Rounded down, one element a rank at least; an all-reduce needs no parts."""
    for case in cases(3):
        for ranks in range(2, 9):
            numel = case.numel(ranks)
            whole = case.operation == "all_reduce"
            assert numel == case.size_bytes // 4 if whole else numel % ranks == 0
            assert numel > case.size_bytes // 4 - ranks
    assert Case("all_gather", 4, pairs=1).numel(3) == 3


def rows_of(place: Any, operations: list[str]) -> list[dict[str, Any]]:
    """Gloo in the place of shared memory."""
    groups = [
        GroupCollective(
            dist.ProcessGroupGloo(dist.PrefixStore(name, place.store), place.rank, place.size, timedelta(seconds=30))
        )
        for name in ("gloo", "shm", "clock")
    ]
    sides = {"gloo": groups[0], "shm": groups[1]}
    return [row_of(Case(operation, 1000, pairs=3), sides, groups[2]) for operation in operations]


def test_three_ranks_measure_every_collective_beside_its_bound(ranks) -> None:
    """250 elements are 249 in three parts."""
    for rows in ranks(3, rows_of, list(LEAST_WORK)):
        assert {row["operation"]: row["bytes"] for row in rows} == {
            "all_reduce": 1000, "reduce_scatter": 996, "all_gather": 996,
        }  # fmt: skip
        assert all(row["of_the_bound"] > 0 for row in rows)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bound_does_the_work_of_one_rank(ranks: int) -> None:
    """In several pieces: the parts of a reduce-scatter are added up, those of an all-gather are written."""
    numel = 100_000 * ranks
    whole, part = torch.arange(numel, dtype=torch.float32) % 97, torch.full((numel // ranks,), torch.nan)
    expected = whole.view(ranks, -1).sum(0)
    LEAST_WORK["reduce_scatter"](whole, part, scratch_of(whole), ranks=ranks)
    assert torch.equal(part, expected)
    whole.fill_(torch.nan)
    LEAST_WORK["all_gather"](whole, part, scratch_of(whole), ranks=ranks)
    assert torch.equal(whole.view(ranks, -1)[0], part)
    assert not whole.isnan().any()


def test_the_picture_shows_each_case_the_promise_and_the_aim(tmp_path: Path) -> None:
    """The SVG draws text as glyphs and has the text itself in comments."""
    rows = [
        {"operation": operation, "bytes": size, "ranks": ranks, "ratio_median": 3.0, "of_the_bound": 0.9,
         "promised": promised}
        for operation, size, promised in (("all_reduce", 65536, 5.0), ("all_gather", (16 << 20) - 4, None))
        for ranks in (2, 3)
    ]  # fmt: skip
    path = tmp_path / "wire.svg"
    write_wire_picture(rows, path)
    text = path.read_text()
    for said in ("all_reduce, 64 KiB", "all_gather, 16 MiB", "2 ranks", "3 ranks", "promised", "aim: 0.95"):
        assert f"<!-- {said} -->" in text, said


def test_sizes_are_named_by_the_unit_that_fits() -> None:
    assert [size_name(size) for size in (4, 65536, 3 << 19, 1 << 20)] == ["4 B", "64 KiB", "1536 KiB", "1 MiB"]


def test_one_target_leaves_the_figures_of_the_wire() -> None:
    """`make bench-wire` writes collectives and their picture, programs, and steps of 2 and of 4 ranks."""
    done = subprocess.run(["make", "-n", "bench-wire"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("wire.json", "wire.png", "programs.json", "step.json", "step-4.json"):
        assert f" out/bench-{name}\n" in done.stdout, name
