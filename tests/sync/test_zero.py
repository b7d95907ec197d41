"""ZeRO-1, -2 and -3 against one process."""

from __future__ import annotations

import pytest
import torch

from shoal.topology.layout import Layout
from tests.sync.training import Case, plain, trajectory

SUM_ORDER = 1e-12  # float64, a few steps of Adam: only the order of sums differs


def furthest(place, case: Case) -> float:
    """The largest difference from one process, in norms and parameters, relative to the largest number."""
    norms, parameters = trajectory(place, case)
    wanted_norms, wanted = plain(case)
    worst = max(abs(a - b) / b for a, b in zip(norms, wanted_norms, strict=True))
    assert parameters.keys() == wanted.keys()
    return max([worst, *(float((parameters[n] - w).abs().max() / w.abs().max()) for n, w in wanted.items())])


LAYOUTS = [Layout(shard=2), Layout(shard=4), Layout(replicate=2, shard=2), Layout(shard=2, context=2)]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("zero", [None, 1, 2, 3])
def test_every_stage_trains_like_one_process(ranks, zero: int | None, layout: Layout, accumulation: int) -> None:
    """Tied, unused, tiny and conditionally used parameters, clipped, accumulated: the weights are those of one."""
    case = Case(layout, zero, accumulation=accumulation)
    worst = max(ranks(layout.world_size, furthest, case))
    assert worst < SUM_ORDER, worst
