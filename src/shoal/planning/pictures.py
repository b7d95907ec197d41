"""A plan as pictures: memory of every pipeline rank, the scaling curve, the pipeline's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.cost.plan import Plan
from shoal.errors import ConfigError
from shoal.models.config import GPTConfig
from shoal.planner.predict.predictor import Predictor
from shoal.planner.search.scaling import SizedPlan
from shoal.planner.simulate.outcome import outcome, timeline_of
from shoal.planner.simulate.work import Stragglers, work_of
from shoal.planning.answer import cluster_of, predictor_of
from shoal.planning.plan_file import written_plan
from shoal.planning.simulating import fold_of, table_of
from shoal.runfile.layout_rules import MicrobatchSizes, microbatch_sizes
from shoal.runfile.run_file import RunFile
from shoal.schedules.build import build
from shoal.schedules.table import ScheduleTable
from shoal.schedules.timeline import Timeline, drawn, in_flight, label, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# A schedule as a picture, planned or as it was measured: time to the right, a bar for each action, white for idle.


_COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#76b7b2", "W": "#edc948"}
_WORDS = {"F": "forward", "B": "backward", "I": "input's gradient", "W": "weights' gradients"}
_FORMATS = (".png", ".svg", ".pdf")
_MOST_LABELS = 40
"""Microbatches a rank up to which bars are wide enough for words."""


def draw_picture(table: ScheduleTable, times: Timeline, path: Path, *, unit: str = "seconds") -> None:
    """Writes the picture to `path`; its suffix decides the format (png, svg, pdf). A rank's later stages are darker.

    `unit` is that of `times`. Raises `ConfigError` for another suffix.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: a picture is written as {', '.join(_FORMATS)}; give the file one of these suffixes")
    figure = Figure(figsize=(14, 1.2 + 0.45 * table.ranks), layout="constrained")
    axes = figure.add_subplot()
    for rank, row in enumerate(times.spans):
        stages = table.stages_of(rank)
        for action, start_s, end_s in row:
            alpha = 0.55 + 0.45 * (stages.index(action.stage) + 1) / len(stages)
            axes.barh(rank, end_s - start_s, left=start_s, color=_COLOURS[action.kind], alpha=alpha, edgecolor="white")
            if table.microbatches * len(stages) <= _MOST_LABELS:
                axes.text((start_s + end_s) / 2, rank, label(table, action)[1:], ha="center", va="center", fontsize=7)
    axes.set_yticks(range(table.ranks), _names(table, times))
    axes.invert_yaxis()
    axes.set_xlim(0, times.makespan_s)
    axes.set_xlabel(unit)
    axes.set_title(f"{table.name}, {table.microbatches} microbatches: idle {times.bubble:.1%}", loc="left")
    used = [kind for kind in _WORDS if any(action.kind == kind for row in table.rows for action in row)]
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in used], ncols=len(used), fontsize=8,
        loc="lower right", bbox_to_anchor=(1, 1), frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def _names(table: ScheduleTable, times: Timeline) -> list[str]:
    stored = in_flight(table)
    return [f"rank {r}: idle {times.idle_shares[r]:.0%}, stores {stored[r]}" for r in range(table.ranks)]


GIB = 2**30
MOST_SHOWN = 4
"""Microbatches of the pipeline's picture, in units of its ranks."""

MOST_BARS = 64
"""Pipeline ranks that are drawn; of more, the first ones and the last."""


def draw_plan(folder: Path, predictor: Predictor, plan: Plan, scales: Sequence[SizedPlan]) -> list[Path]:
    """Writes memory.png, scaling.png and, of a pipeline, pipeline.png into `folder`; the files that were written.

    The folder is made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "memory.png", folder / "scaling.png"]
    _memory(predictor, plan).savefig(written[0], dpi=140)
    _scaling(scales).savefig(written[1], dpi=140)
    if plan.layout.pipeline > 1 and predictor.simulates:
        written.append(folder / "pipeline.png")
        _pipeline(written[-1], predictor, plan)
    return written


def _pipeline(path: Path, predictor: Predictor, plan: Plan) -> None:
    """One step as the simulator plays it; of many microbatches the first ones, whose fill and drain are the bubble."""
    shown = replace(plan, microbatches=min(plan.microbatches, MOST_SHOWN * plan.layout.pipeline))
    table = table_of(shown)
    played = outcome(table, work_of(shown, predictor), fold=fold_of(shown, Stragglers()), stragglers=Stragglers())
    draw_picture(table, timeline_of(played.step), path)


def _memory(predictor: Predictor, plan: Plan) -> Figure:
    """A bar a pipeline rank, its items stacked, beneath the line of what the device has."""
    pipeline = plan.layout.pipeline
    ranks = [rank for rank in range(pipeline) if rank < MOST_BARS - 1 or rank == pipeline - 1]
    footprints = [predictor.footprint(plan, rank).items() for rank in ranks]
    figure, axes = _figure(width=max(6.0, 2 + 0.3 * len(ranks)))
    floor = [0.0] * len(ranks)
    for item in footprints[0]:
        sizes = [one[item] / GIB for one in footprints]
        if any(sizes):
            axes.bar(range(len(ranks)), sizes, bottom=floor, label=item)
            floor = [a + b for a, b in zip(floor, sizes, strict=True)]
    limit = predictor.cluster.device.memory_bytes / GIB
    axes.axhline(limit, color="black", linewidth=1, linestyle="--", label="the device has")
    axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_xlabel("pipeline rank")
    axes.set_ylabel("GiB")
    axes.set_title(plan.describe(), fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _scaling(scales: Sequence[SizedPlan]) -> Figure:
    """Tokens per second over devices, and the line of perfect scaling from the fewest."""
    figure, axes = _figure()
    devices = [one.devices for one in scales]
    rates = [one.prediction.tokens_per_s for one in scales]
    axes.plot(devices, rates, marker="o", label="best plan of each size")
    axes.plot(devices, [rates[0] * n / devices[0] for n in devices], linestyle="--", color="grey", label="perfect")
    for one, rate in zip(scales, rates, strict=True):
        axes.annotate(f"MFU {one.prediction.mfu:.0%}", (one.devices, rate), fontsize=7, xytext=(4, -10),
                      textcoords="offset points")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(devices, [str(n) for n in devices])
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=8)
    return figure


def _figure(*, width: float = 6.5) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure, figure.add_subplot()


# The schedule of a run file's pipeline, to be looked at: in equal parts, or in the seconds of a simulated step.


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
        ranks = run_file.stated_processes or run_file.layout.pipeline
    layout = run_file.layout.layout(ranks)
    return microbatch_sizes(run_file, shares=layout.replicate * layout.shard)
