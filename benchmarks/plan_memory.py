"""Memory of published steps: does what ran fit, and how near are the peaks that were published with it?

A step that was measured did fit on its devices, so a prediction beyond their memory is wrong. Peaks of PyTorch programs
are those that its allocator reserved; the check is on theirs. OneFlow, which lays its memory out before a run, is shown
beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plan_errors import Machine
from benchmarks.published import Row
from shoal.bench.report import Check, check
from shoal.planner.predict.predictor import Predictor

GIB = 2**30
REFUSED_SHARE, PEAK_ERROR = 0.05, 0.10
WORST_SHOWN = 20
ONEFLOW = "OneFlow"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A row's fullest rank in bytes: predicted, and what its device has."""

    row: Row
    predicted: float
    limit: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.row.measured_bytes is None else self.predicted / self.row.measured_bytes - 1


def peaks(machines: Sequence[Machine]) -> list[Peak]:
    """Of every published row."""
    found = []
    for row in (row for machine in machines for row in machine.rows):
        one = Predictor(row.workload, row.cluster, stack=row.stack)
        need = max(footprint.total for footprint in one.footprints(row.plan))
        found.append(Peak(row=row, predicted=need, limit=row.cluster.device.memory_bytes))
    return found


def memory_checks(found: Sequence[Peak]) -> list[Check]:
    """The share of rows that ran and are predicted not to, and the median error of published peaks."""
    refused = sum(one.predicted > one.limit for one in found) / len(found)
    errors = [abs(one.error) for one in found if one.error is not None and ONEFLOW not in one.row.table]
    return [
        check("published steps that ran, refused for memory: share", refused, REFUSED_SHARE, at_most=True),
        check("published peaks of PyTorch programs: median error", statistics.median(errors), PEAK_ERROR, at_most=True),
    ]


def memory_page(found: Sequence[Peak]) -> list[str]:
    """Markdown: by table, how many rows do not fit, and the peaks that were published."""
    lines = ["", "## Memory", "", "| table | rows | predicted not to fit | peaks published | error: median, worst |"]
    lines.append("|---|---|---|---|---|")
    for table in dict.fromkeys(one.row.table for one in found):
        own = [one for one in found if one.row.table == table]
        errors = [one.error for one in own if one.error is not None]
        refused = sum(one.predicted > one.limit for one in own)
        said = f"{statistics.median(errors):+.1%}, {max(errors, key=abs):+.1%}" if errors else ""
        lines.append(f"| {table} | {len(own)} | {refused} | {len(errors) or ''} | {said} |")
    worst = sorted((one for one in found if one.predicted > one.limit), key=lambda one: -one.predicted / one.limit)
    lines += ["", "Predicted not to fit, worst first:", ""]
    for one in worst[:WORST_SHOWN]:
        sizes = f"{one.predicted / GIB:.1f} GiB of {one.limit / GIB:.0f}"
        lines.append(f"- {one.row.table}: {one.row.name}: {sizes}")
    return lines
