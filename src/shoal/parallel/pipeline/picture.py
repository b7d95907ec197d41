"""A schedule as a picture, planned or as it was measured: time to the right, a bar for each action, white for idle."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ConfigError
from shoal.schedules.table import ScheduleTable
from shoal.schedules.timeline import Timeline, in_flight, label

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
