"""The schedule of a run file's pipeline, to be looked at: in equal parts, or in the seconds of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shoal.errors import ConfigError
from shoal.models.config import GPTConfig
from shoal.planner.simulate.outcome import outcome, timeline_of
from shoal.planner.simulate.work import Stragglers, work_of
from shoal.planning.answer import cluster_of, predictor_of
from shoal.planning.plan_file import written_plan
from shoal.planning.simulating import fold_of, table_of
from shoal.runfile.microbatches import MicrobatchSizes, microbatch_sizes
from shoal.runfile.run_file import RunFile
from shoal.schedules.build import build
from shoal.schedules.table import ScheduleTable
from shoal.schedules.timeline import Timeline, drawn, in_flight, timeline

Unit = Literal["seconds", "parts"]


@dataclass(frozen=True)
class ScheduleView:
    """One pass through the pipeline: `times` in `unit`, where "parts" are those of F = I = W = 1."""

    table: ScheduleTable
    times: Timeline
    unit: Unit

    def text(self) -> str:
        """The textbook's picture, in equal parts, and what each rank's seconds come to where they are known."""
        if self.unit == "parts":
            return drawn(self.table)
        idle = " ".join(f"{share:.1%}" for share in self.times.idle_shares)
        span = f"simulated: {self.times.makespan_s:.4g} s; idle: {idle} (mean {self.times.bubble:.1%})"
        return f"{drawn(self.table)}\n{span}"

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON; start and end in `unit`."""
        table, times = self.table, self.times
        rows = [[{**action._asdict(), "start": start, "end": end} for action, start, end in row] for row in times.spans]
        return {
            "schedule": table.name,
            "ranks": table.ranks,
            "stages": table.stages,
            "microbatches": table.microbatches,
            "unit": self.unit,
            "makespan": times.makespan_s,
            "bubble": times.bubble,
            "idle_shares": list(times.idle_shares),
            "in_flight": list(in_flight(table)),
            "rows": rows,
        }

    def draw(self, path: Path) -> None:
        """Writes the picture; the suffix of `path` decides the format. Raises `ConfigError` for an unknown one."""
        from shoal.parallel.pipeline.picture import draw_picture

        draw_picture(self.table, self.times, path, unit=self.unit)


def schedule_view(run_file: RunFile, cluster: Path | None, *, stragglers: Stragglers) -> ScheduleView:
    """What the ranks of `layout.pipeline` do with the microbatches that are under way together.

    In seconds for models whose sizes the run file tells; in equal parts for others, and for what has no price:
    PipeDream, matrices in blocks on a grid. Raises `ConfigError` without a pipeline, `LayoutError` for sizes that the
    schedule does not take.
    """
    layout, pipeline = run_file.layout, run_file.pipeline
    if layout.pipeline == 1:
        raise ConfigError(
            "layout.pipeline = 1: without a pipeline there is no schedule to show; set it to the number of ranks that "
            "share the layers, such as layout.pipeline=4"
        )
    sizes = _sizes(run_file, cluster)
    if pipeline.asynchronous or layout.tensor_grid is not None or not isinstance(run_file.model, GPTConfig):
        table = build(
            pipeline.schedule,
            ranks=layout.pipeline,
            microbatches=sizes.in_flight,
            stages_per_rank=pipeline.stages_per_rank,
        )
        return ScheduleView(table, timeline(table, forward_s=1, backward_input_s=1, backward_weight_s=1), "parts")
    written = written_plan(run_file, cluster_of(run_file, cluster))
    plan = replace(written, microbatch=sizes.samples, microbatches=sizes.in_flight)
    table, predictor = table_of(plan), predictor_of(run_file, cluster)
    played = outcome(table, work_of(plan, predictor), fold=fold_of(plan, stragglers), stragglers=stragglers)
    return ScheduleView(table, timeline_of(played.step), "seconds")


def _sizes(run_file: RunFile, cluster: Path | None) -> MicrobatchSizes:
    """What runs on the devices of the cluster file; without one, on the ranks that the run file asks for."""
    if cluster is not None:
        ranks = cluster_of(run_file, cluster).devices
    else:
        ranks = run_file.run.processes or run_file.layout.default_processes or run_file.layout.pipeline
    layout = run_file.layout.layout(ranks)
    return microbatch_sizes(run_file, shares=layout.replicate * layout.shard)
