"""Under PyTorch's names stand PyTorch's orders."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as pytorch

from shoal.errors import LayoutError
from shoal.schedules.build import build, round_size
from shoal.schedules.table import KINDS

CLASSES: dict[str, Any] = {
    "GPipe": pytorch.ScheduleGPipe,
    "1F1B": pytorch.Schedule1F1B,
    "Interleaved1F1B": pytorch.ScheduleInterleaved1F1B,
    "LoopedBFS": pytorch.ScheduleLoopedBFS,
    "InterleavedZeroBubble": pytorch.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": pytorch.ScheduleZBVZeroBubble,
    "DualPipeV": pytorch.ScheduleDualPipeV,
}


def order_of(name: str, rank: int, *, ranks: int, microbatches: int, per_rank: int) -> list[tuple[str, int, int]]:
    """What PyTorch's schedule lists for a rank, made without stages or process groups: its order needs sizes alone."""
    made = object.__new__(CLASSES[name])
    made.pp_group_size, made.rank, made.n_local_stages = ranks, rank, per_rank
    made.num_stages = made._num_stages = ranks * per_rank
    made._n_microbatches, made._stages = microbatches, [None] * per_rank
    made.microbatches_per_round = round_size(microbatches, ranks)
    single = name in ("GPipe", "1F1B")
    actions = made._get_pipeline_order()[rank] if single else made._calculate_single_rank_operations(rank)
    flat = [sub for a in actions if a is not None for sub in (a.sub_actions or (a,))]
    computed = [a for a in flat if a.computation_type.value in KINDS]
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in computed]


@pytest.mark.parametrize("name", CLASSES)
def test_rows_equal_pytorchs(name: str) -> None:
    """Action by action, over ranks, microbatches and stages a rank; overlapped pairs one after the other.

    Of 1F1B, what PyTorch prints for the last rank, and with fewer microbatches than ranks, counts microbatches that do
    not exist: left out.
    """
    compared = 0
    for ranks in (2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24):
            if name == "1F1B" and microbatches < ranks:
                continue
            for per_rank in {"GPipe": (1,), "1F1B": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,)}.get(name, (2, 3)):
                try:
                    table = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
                except LayoutError:
                    continue
                for rank in range(ranks - (name == "1F1B")):
                    theirs = order_of(name, rank, ranks=ranks, microbatches=microbatches, per_rank=per_rank)
                    assert [tuple(action) for action in table.rows[rank]] == theirs, (ranks, microbatches, rank)
                    compared += 1
    assert compared >= 40
