"""`python -m benchmarks.simulate TABLES`: the simulator beside published figures and closed forms, worst first.

Published are the zero-bubble paper's tables, and Llama 3's effective training time with its rate of failures. The
closed form is the optimal interval between saves. The simulator's own speed is measured on the largest job that is
promised, 405B on 16,384 devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.command import run
from benchmarks.plan import llama_405b_predictor
from benchmarks.zero_bubble import Compared, bubble_rates, peak_memory, throughput
from shoal.bench.options import AsJson
from shoal.bench.report import Check, Result, check, print_report
from shoal.cost.interval import availability_optimal_s
from shoal.cost.plan import Plan
from shoal.planner.simulate.goodput import Faults, goodput
from shoal.planner.simulate.outcome import outcome
from shoal.planner.simulate.work import work_of
from shoal.planning.simulating import table_of
from shoal.topology.layout import Layout

BOUNDS = MappingProxyType({"1F1B": 0.001, "1F1B-I": 0.01, "ZB-H1": 0.01, "ZB-H2": 0.01, "ZB-1p": 0.01, "ZB-2p": 0.01})
LLAMA = Faults(between_s=54 * 86400 / 419, recovery_s=600, save_s=2)
"""419 unexpected interruptions in 54 days (arXiv:2407.21783, section 3.3.4); ten minutes to recover: assumed."""
LLAMA_PLAN = Plan(
    layout=Layout(shard=128, pipeline=16, tensor=8),
    microbatch=1,
    microbatches=16,
    schedule="Interleaved1F1B",
    virtual_stages=4,
    zero=1,
    sequence_parallel=True,
)
MONTH_S = 30 * 86400.0
SAVE_EVERY_S = 600.0
SAVINGS = Faults(between_s=20_000, recovery_s=600, save_s=30)
FAILURES, SEEDS = 2000, range(2)


def simulate(
    tables: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of published tables.")],
    as_json: AsJson = False,
) -> None:
    """The simulator beside the zero-bubble paper's tables and closed forms.

    Example: python -m benchmarks.simulate tests/planner/published
    """
    print_report("simulate", measure(tables), as_json=as_json)


def measure(folder: Path) -> Result:
    """Rows and checks for the tables in `folder`. Raises `OSError` where one is missing."""
    rates, rows, memory = list(bubble_rates(folder)), list(throughput(folder)), list(peak_memory(folder))
    checks = [
        check(f"bubble rate of {name}: worst difference", _worst([r for r in rates if r.schedule == name]), bound,
              at_most=True)
        for name, bound in BOUNDS.items()
    ]  # fmt: skip
    checks += [
        check("zero-bubble throughput: worst error", _worst(rows), 0.08, at_most=True),
        check("zero-bubble peak memory: worst error", _worst(memory), 0.10, at_most=True),
    ]
    more_rows, more_checks = _weeks()
    speed_row, speed_check = _speed()
    tables = [_record(one) for table in (rates, rows, memory) for one in sorted(table, key=_size, reverse=True)]
    return {"rows": [*tables, *more_rows, speed_row], "checks": [*checks, *more_checks, speed_check]}


def _weeks() -> tuple[list[dict[str, Any]], list[Check]]:
    """A month of a job like Llama 3's, and the best interval between saves."""
    begin_s = time.process_time()
    month = goodput(LLAMA, every_s=SAVE_EVERY_S, wall_s=MONTH_S)
    took_s = time.process_time() - begin_s
    formula_s = availability_optimal_s(SAVINGS.save_s, SAVINGS.between_s, recovery_s=SAVINGS.recovery_s)
    found_s = best_interval(SAVINGS, wall_s=FAILURES * SAVINGS.between_s, seeds=SEEDS, around_s=formula_s)
    rows = [
        {"table": "month of Llama 3 405B", "failures": month.failures, "effective_share": month.effective_share},
        {"table": "interval between saves", "formula_s": formula_s, "simulated_s": found_s},
    ]
    checks = [
        check("Llama 3's failures: effective share (published: over 0.90)", month.effective_share, 0.90),
        check("interval between saves: error against the formula", abs(found_s / formula_s - 1), 0.10, at_most=True),
        check("a month with failures: processor seconds", took_s, 30.0, at_most=True),
    ]
    return rows, checks


def best_interval(
    faults: Faults, *, wall_s: float, seeds: Sequence[int], around_s: float, points: int = 41, spread: float = 4.0
) -> float:
    """The interval that trains most in simulation, save included, between `around_s` / `spread` and times `spread`.

    Every interval meets the same failures (common random numbers), and a parabola through the logarithm of the
    interval smooths what is left of the noise.
    """
    steps = [math.log(spread) * (2 * point / (points - 1) - 1) for point in range(points)]
    shares = [_mean_share(faults, around_s * math.exp(step), wall_s, seeds) for step in steps]
    peak = max(range(points), key=shares.__getitem__)
    window = range(max(0, peak - points // 8), min(points, peak + points // 8 + 1))
    top = _vertex([steps[n] for n in window], [shares[n] for n in window])
    return around_s * math.exp(top) + faults.save_s


def _mean_share(faults: Faults, every_s: float, wall_s: float, seeds: Sequence[int]) -> float:
    runs = (goodput(faults, every_s=every_s, wall_s=wall_s, seed=seed) for seed in seeds)
    return sum(one.effective_share for one in runs) / len(seeds)


def _vertex(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Where the least-squares parabola through the points is largest; the best point where it has no maximum."""
    curve, slope, _ = np.polyfit(xs, ys, 2)
    best = xs[max(range(len(ys)), key=ys.__getitem__)]
    return float(min(max(-slope / (2 * curve), min(xs)), max(xs))) if curve < 0 else best


def _speed() -> tuple[dict[str, Any], Check]:
    """One step of 405B on 16,384 devices: pricing its parts, and simulating it over a perfect network."""
    predictor = llama_405b_predictor()
    begin_s = time.process_time()
    found = outcome(table_of(LLAMA_PLAN), work_of(LLAMA_PLAN, predictor))
    took_s = time.process_time() - begin_s
    row = {
        "table": "405B on 16,384",
        "plan": LLAMA_PLAN.describe(),
        "simulated_s": found.step_s,
        "closed_forms_s": predictor.bill(LLAMA_PLAN).total,
        "bubble": found.bubble,
        "processor_s": took_s,
    }
    return row, check("405B on 16,384 devices: processor seconds of a step", took_s, 5.0, at_most=True)


def _record(one: Compared) -> dict[str, Any]:
    return {
        "table": f"zero bubble, {one.what}",
        "row": f"{one.model} {one.schedule} m={one.microbatches}",
        "paper": one.paper,
        "simulated": round(one.simulated, 4),
        "difference": round(one.difference, 4),
    }


def _size(one: Compared) -> float:
    return abs(one.difference)


def _worst(rows: Sequence[Compared]) -> float:
    return max(_size(one) for one in rows)


if __name__ == "__main__":
    run(simulate)
