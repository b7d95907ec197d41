"""A plan as pictures: memory of every pipeline rank, the scaling curve, the pipeline's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cost.plan import Plan
from shoal.parallel.pipeline.picture import draw_picture
from shoal.planner.predict.predictor import Predictor
from shoal.planner.search.scaling import Choice
from shoal.planner.simulate.outcome import outcome, timeline_of
from shoal.planner.simulate.work import Stragglers, work_of
from shoal.planning.simulating import fold_of, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
MOST_SHOWN = 4
"""Microbatches of the pipeline's picture, in units of its ranks."""

MOST_BARS = 64
"""Pipeline ranks that are drawn; of more, the first ones and the last."""


def draw_plan(folder: Path, predictor: Predictor, plan: Plan, scales: Sequence[Choice]) -> list[Path]:
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


def _scaling(scales: Sequence[Choice]) -> Figure:
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
