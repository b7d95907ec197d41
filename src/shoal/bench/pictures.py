"""The pictures of `shoal bench comm` and `shoal bench sync`, and what they share: colours, axes, panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

# The picture of `shoal bench comm`: bus bandwidth over size, a panel for each operation, a line for each backend.
#
# It is a PNG, SVG or PDF by the file's suffix. `new_panels` and `decorate` give other benchmarks' pictures the same
# look.


SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#5a6d76", "#0b7a75", "#d9532c", "#6b4fa0", "#c28f0e")
INK, RULE = "#12242d", "#e8edef"


def picture_path(path: Path | None) -> Path | None:
    """Checks an option: `path` has a picture's suffix and its folder exists, or `typer.BadParameter`."""
    if path is None:
        return None
    if path.suffix.lower() not in SUFFIXES:
        raise typer.BadParameter(
            f"{path}: a picture is written as {', '.join(SUFFIXES)}; give it one of these suffixes"
        )
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.absolute().parent}; make it, or give another")
    return path


def write_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the `rows` of `shoal bench comm` to `path`."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    columns, lines = min(3, len(operations)), -(-len(operations) // 3)
    figure, panels = new_panels(lines, columns, size_inches=(4.2 * columns, 3.2 * lines))
    for axes in panels[len(operations) :]:
        axes.set_visible(False)
    for operation, axes in zip(operations, panels, strict=False):
        _draw_collectives(axes, operation, [row for row in rows if row["operation"] == operation])
    figure.savefig(path)


def new_panels(lines: int, columns: int, *, size_inches: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure and its axes, line by line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def decorate(axes: Any, title: str, *, x_label: str) -> None:
    """Title, label, grid and legend of one panel."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel(x_label, fontsize=8)
    axes.grid(color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)


def _draw_collectives(axes: Any, operation: str, rows: Sequence[dict[str, Any]]) -> None:
    series = dict.fromkeys((row["backend"], row["ranks"]) for row in rows)
    backends = list(dict.fromkeys(backend for backend, _ in series))
    world_sizes = sorted({ranks for _, ranks in series})
    for backend, ranks in series:
        own = [row for row in rows if (row["backend"], row["ranks"]) == (backend, ranks)]
        axes.plot(
            [row["bytes"] for row in own], [row["busbw_gb_s"] for row in own], marker=".", linewidth=1.6,
            color=COLOURS[backends.index(backend) % len(COLOURS)], label=f"{backend}, {ranks} ranks",
            linestyle=("-", "--", ":", "-.")[world_sizes.index(ranks) % 4],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("bus bandwidth, GB/s", fontsize=8)
    decorate(axes, operation, x_label="bytes")


# The picture of `shoal bench sync`: held-out loss over time, a panel for each machine, a line for each strategy.


DASHES = ("-", "--", ":", "-.")
Rows = Sequence[dict[str, Any]]


def write_sync_picture(rows: Rows, path: Path, *, loss: float) -> None:
    """Draws the `rows` of `shoal bench sync`, with their curves, to `path`; a line marks the `loss` of the race."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    figure, panels = new_panels(1, len(machines), size_inches=(5.6 * len(machines), 4.2))
    for machine, axes in zip(machines, panels, strict=True):
        for row in rows:
            if row["machine"] == machine:
                _draw_strategies(axes, row, number=names.index(row["strategy"]))
        axes.axhline(loss, color=INK, linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel("held-out loss", fontsize=8)
        decorate(axes, machine, x_label="seconds")
    figure.savefig(path)


def _draw_strategies(axes: Any, row: dict[str, Any], *, number: int) -> None:
    seconds, _, losses = zip(*row["curve"], strict=True)
    colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    axes.plot(seconds, losses, color=colour, linestyle=dashes, linewidth=1.6, label=row["strategy"])
