"""The bubble of each schedule, measured on live ranks whose stages sleep, beside the one of its table.

The stages of a rank together sleep equally long whatever their number: forward, gradient of activations and gradient of
weights one unit each. A rank's idle share is 1 - busy / makespan, from the moment all ranks start until the last ends.
Of several passes the median is compared; all are in the row.
"""

from __future__ import annotations

import statistics
from typing import Any, get_args

import torch

from shoal.comm.collective import Collective
from shoal.parallel.pipeline.rehearsal import planned, rehearse
from shoal.recipes.benchmarks.paired import check
from shoal.schedules.build import build, stages_per_rank_of
from shoal.schedules.names import Schedule
from shoal.schedules.table import Table

MICROBATCHES = 8
UNIT_S, WARM_UP_S = 0.3, 1e-4
"""Of a rank and microbatch. Waking up a rank costs 1 ms where ranks are more than cores; the smallest bubble is 6 % of
a pass, and 15 % of that has to be seen."""
OFF_THE_TABLE = 0.15


def by_schedule(group: Collective, *, repeats: int) -> dict[str, Any]:
    """A row and a check for each schedule; the median of `repeats` passes."""
    rows, checks = [], []
    for name in get_args(Schedule):
        table = build(name, ranks=group.size, microbatches=MICROBATCHES)
        unit_s = UNIT_S / stages_per_rank_of(name)
        _pass(table, group, WARM_UP_S)
        passes = [_pass(table, group, unit_s) for _ in range(repeats)]
        wanted = planned(table, forward_s=unit_s, backward_input_s=unit_s, backward_weight_s=unit_s).bubble
        share = statistics.median(idle_share for _, idle_share in passes)
        rows.append(
            {
                "schedule": name,
                "ranks": group.size,
                "microbatches": MICROBATCHES,
                "idle_share": round(share, 4),
                "of_its_table": round(wanted, 4),
                "over_the_table": round(share / wanted, 4),
                "makespan_s": [round(makespan_s, 3) for makespan_s, _ in passes],
                "idle_shares": [round(value, 4) for _, value in passes],
            }
        )
        off = abs(share / wanted - 1)
        checks.append(check(f"{name}: idle share off its table", off, OFF_THE_TABLE, at_most=True))
    return {"rows": rows, "checks": checks}


def _pass(table: Table, group: Collective, unit_s: float) -> tuple[float, float]:
    """Makespan, and the mean of the ranks' idle shares; the same on each."""
    run = rehearse(table, group, forward_s=unit_s, backward_input_s=unit_s, backward_weight_s=unit_s)
    busy_s = torch.tensor(run.busy_s, dtype=torch.float64)
    makespan_s = torch.tensor(run.busy_s + run.idle_s, dtype=torch.float64)
    group.all_reduce(busy_s).wait()
    group.all_reduce(makespan_s, "max").wait()
    return float(makespan_s), 1 - float(busy_s) / group.size / float(makespan_s)
