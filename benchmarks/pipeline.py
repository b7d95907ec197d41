"""`python -m benchmarks.pipeline`: bubbles, activations in flight and balance of the stages, on four ranks.

Bubbles: live ranks run each schedule with stages that sleep, and their idle share is compared with that of the
schedule's table. The stages of a rank sleep equally long together, whatever their number: one unit each for the
forward, the gradient of activations and the gradient of weights. A rank's idle share is 1 - busy / makespan, from the
moment all ranks start until the last one ends. The median of several runs is compared; all are in the row.

Activations: in a training step, a rank keeps those of as many microbatches as its schedule has in flight,

    most kept = in flight x what one microbatch keeps,

the latter measured with a step of one microbatch. Stages differ from rank to rank, so that each rank is compared with
itself.

Balance (`pipeline_balance`): rank 0 measures it when the others are done.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from benchmarks.pipeline_balance import balance_result
from benchmarks.pipeline_rehearsal import planned, rehearse
from shoal.bench.groups import join_mesh, join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, check, merged, print_report
from shoal.bench.training_job import corpus_file, start_training
from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.data.config import BatchConfig, Tokens
from shoal.launcher.environment import Place
from shoal.memory.tracker import SavedActivations
from shoal.models.config import GPTConfig
from shoal.parallel.config import PipelineConfig
from shoal.runfile.run_file import RunConfig, RunFile
from shoal.schedules.build import build, stages_per_rank_of
from shoal.schedules.table import Schedule, ScheduleTable
from shoal.schedules.timeline import in_flight
from shoal.topology.config import LayoutConfig
from shoal.topology.layout import Layout

RANKS, MICROBATCHES = 4, 8
UNIT_S, WARM_UP_S = 0.3, 1e-4
"""Of a rank and microbatch. Waking up a rank costs 1 ms where there are more ranks than cores; the smallest bubble is
6 % of a run, and 15 % of that has to be visible."""
OFF_THE_TABLE = 0.15
MODEL = GPTConfig(layers=8, width=64, heads=4)
SEQUENCE, LR = 128, 1e-3
TRAINED_SCHEDULES: tuple[Schedule, ...] = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
OFF_THE_COUNT = 0.10


def pipeline(
    repeats: Annotated[int, typer.Option(help="Runs of each schedule, of which the median counts.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Pipelines of four ranks: bubble of each schedule, activations in flight, and how even the automatic cut is.

    Example: python -m benchmarks.pipeline --repeats 1
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, repeats=repeats))
        return
    result = on_ranks(["benchmarks.pipeline", "--repeats", str(repeats)], processes=RANKS)
    print_report("pipeline", result, as_json=as_json)


def measure(place: Place, *, repeats: int) -> Result | None:
    """Rows and checks of all parts; None on all ranks but rank 0."""
    store = join_store(place)
    mesh = join_mesh(Layout(pipeline=place.world_size), place, PrefixStore("bubble", store))
    parts = [bubbles(mesh.axis("pipeline"), repeats=repeats), activations(place, PrefixStore("in-flight", store))]
    return merged([*parts, balance_result(stages=place.world_size)]) if place.rank == 0 else None


def bubbles(group: Collective, *, repeats: int) -> Result:
    """A row and a check for each schedule, from the median of `repeats` runs."""
    rows, checks = [], []
    for name in get_args(Schedule):
        table = build(name, ranks=group.size, microbatches=MICROBATCHES)
        unit_s = UNIT_S / stages_per_rank_of(name)
        _run_table(table, group, WARM_UP_S)
        runs = [_run_table(table, group, unit_s) for _ in range(repeats)]
        wanted = planned(table, forward_s=unit_s, backward_input_s=unit_s, backward_weight_s=unit_s).bubble
        share = statistics.median(idle_share for _, idle_share in runs)
        rows.append(
            {
                "schedule": name,
                "ranks": group.size,
                "microbatches": MICROBATCHES,
                "idle_share": round(share, 4),
                "of_its_table": round(wanted, 4),
                "over_the_table": round(share / wanted, 4),
                "makespan_s": [round(makespan_s, 3) for makespan_s, _ in runs],
                "idle_shares": [round(value, 4) for _, value in runs],
            }
        )
        off = abs(share / wanted - 1)
        checks.append(check(f"{name}: idle share off its table", off, OFF_THE_TABLE, at_most=True))
    return {"rows": rows, "checks": checks}


def activations(place: Place, store: Store) -> Result:
    """A row and a check for each schedule of one stage a rank; the same on every rank."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        corpus = corpus_file(Path(folder))
        one = _most_kept(place, PrefixStore("one", store), corpus, "1F1B", 1)
        kept = {
            name: _most_kept(place, PrefixStore(name, store), corpus, name, MICROBATCHES) for name in TRAINED_SCHEDULES
        }
    rows, checks = [], []
    for name in TRAINED_SCHEDULES:
        counts = in_flight(build(name, ranks=place.world_size, microbatches=MICROBATCHES))
        in_microbatches = [most / unit for most, unit in zip(kept[name], one, strict=True)]
        off = max(abs(found / count - 1) for found, count in zip(in_microbatches, counts, strict=True))
        rows.append(
            {
                "schedule": name,
                "microbatches": MICROBATCHES,
                "most_kept_bytes": kept[name],
                "in_microbatches": [round(value, 3) for value in in_microbatches],
                "in_flight": list(counts),
            }
        )
        checks.append(check(f"{name}: activations of a rank off its count in flight", off, OFF_THE_COUNT, at_most=True))
    return {"rows": rows, "checks": checks}


def _run_table(table: ScheduleTable, group: Collective, unit_s: float) -> tuple[float, float]:
    """Makespan in seconds, and the mean of the ranks' idle shares; the same on each."""
    ran = rehearse(table, group, forward_s=unit_s, backward_input_s=unit_s, backward_weight_s=unit_s)
    busy_s = torch.tensor(ran.busy_s, dtype=torch.float64)
    makespan_s = torch.tensor(ran.busy_s + ran.idle_s, dtype=torch.float64)
    group.all_reduce(busy_s).wait()
    group.all_reduce(makespan_s, "max").wait()
    return float(makespan_s), 1 - float(busy_s) / group.size / float(makespan_s)


def _most_kept(place: Place, store: Store, corpus: Path, schedule: Schedule, microbatches: int) -> list[int]:
    """The most bytes that one step saves for the backward at once, by rank."""
    run_file = RunFile(
        run=RunConfig(name="bench", steps=1, directory=str(corpus.parent)),
        model=MODEL,
        data=Tokens(path=str(corpus), dtype="uint8"),
        wire=WireConfig(timeout_s=600.0),
        batch=BatchConfig(global_samples=microbatches, sequence=SEQUENCE),
        layout=LayoutConfig(pipeline=place.world_size),
        pipeline=PipelineConfig(schedule=schedule, microbatches=microbatches),
    )
    with ExitStack() as stack:
        training = start_training(run_file, place, stack, store=store)
        with SavedActivations(apart=training.run.model.parameters()) as saved:
            training.take_step(lr=LR)
        by_rank = torch.zeros(place.world_size, dtype=torch.int64)
        by_rank[place.rank] = saved.peak_bytes
        training.run.mesh.world.all_reduce(by_rank).wait()
    return by_rank.tolist()


if __name__ == "__main__":
    run(pipeline)
