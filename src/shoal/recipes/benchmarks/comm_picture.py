"""The curves of `shoal bench comm`: bus bandwidth over size, a panel for each operation, a line for each backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#5a6d76", "#0b7a75", "#d9532c", "#6b4fa0", "#c28f0e")
INK, RULE = "#12242d", "#e8edef"


def write_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws `rows` (those of the benchmark's JSON) to `path`, PNG, SVG or PDF by its ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    operations = list(dict.fromkeys(row["operation"] for row in rows))
    figure = Figure(
        figsize=(4.2 * min(3, len(operations)), 3.2 * -(-len(operations) // 3)), dpi=140, layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(-(-len(operations) // 3), min(3, len(operations)), squeeze=False)
    for axes in panels.flat[len(operations) :]:
        axes.set_visible(False)
    for operation, axes in zip(operations, panels.flat, strict=False):
        _draw(axes, operation, [row for row in rows if row["operation"] == operation])
    figure.savefig(path)


def _draw(axes: Any, operation: str, rows: Sequence[dict[str, Any]]) -> None:
    series = dict.fromkeys((row["backend"], row["ranks"]) for row in rows)
    backends = list(dict.fromkeys(backend for backend, _ in series))
    worlds = sorted({ranks for _, ranks in series})
    for backend, ranks in series:
        own = [row for row in rows if (row["backend"], row["ranks"]) == (backend, ranks)]
        axes.plot(
            [row["bytes"] for row in own], [row["busbw_gb_s"] for row in own], marker=".", linewidth=1.6,
            color=COLOURS[backends.index(backend) % len(COLOURS)], label=f"{backend}, {ranks} ranks",
            linestyle=("-", "--", ":", "-.")[worlds.index(ranks) % 4],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(operation, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel("bytes", fontsize=8)
    axes.set_ylabel("bus bandwidth, GB/s", fontsize=8)
    axes.grid(color=RULE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)
