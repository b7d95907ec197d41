"""A run file's own plan is what its ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.assembly.splitting import microbatching
from shoal.cost.plan import Plan
from shoal.planning.answer import cluster_of
from shoal.planning.plan_file import written_plan
from shoal.runfile.run_file import RunFile, with_processes
from tests.verification.layouts import run_file_of


def _written(processes: int, **tables: dict[str, Any]) -> tuple[RunFile, Plan]:
    run_file = with_processes(run_file_of(Path("/nowhere"), **tables), processes)
    return run_file, written_plan(run_file, cluster_of(run_file, None))


@pytest.mark.parametrize(
    ("processes", "samples", "micro", "expected"),
    [(1, 8, None, (8, 1)), (1, 8, 3, (3, 3)), (2, 9, None, (5, 1)), (2, 9, 2, (2, 3)), (3, 8, None, (3, 1))],
)
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_the_fullest_rank_is_priced(
    axis: str, processes: int, samples: int, micro: int | None, expected: tuple[int, int]
) -> None:
    """Shares and microbatches that do not come out are rounded up, as the run rounds them: no sample goes unpriced."""
    batch = {"global_samples": samples, "micro_samples": micro}
    _, plan = _written(processes, layout={axis: processes}, batch=batch)
    assert (plan.microbatch, plan.microbatches) == expected
    assert plan.global_samples >= samples


@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"tensor": 2}, {"context": 2}, {"shard": 2, "tensor": 2}])
@pytest.mark.parametrize("samples", [8, 9])
def test_ranks_that_share_a_replica_are_priced_with_what_is_made_up(
    samples: int, layout: dict[str, int], micro: int | None
) -> None:
    """As many microbatches of as many samples as each of them gets."""
    processes = 4 if len(layout) == 2 else 2
    run_file, plan = _written(processes, layout=layout, batch={"global_samples": samples, "micro_samples": micro})
    uniform = microbatching(run_file, plan.layout).uniform
    assert uniform is not None
    assert (plan.microbatches, plan.microbatch) == (max(uniform.counts), uniform.samples)
