"""The picture of `shoal bench sync`: held-out loss over time, a panel for each machine, a line for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench.comm_picture import COLOURS, INK, decorate, new_panels

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
                _draw(axes, row, number=names.index(row["strategy"]))
        axes.axhline(loss, color=INK, linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel("held-out loss", fontsize=8)
        decorate(axes, machine, x_label="seconds")
    figure.savefig(path)


def _draw(axes: Any, row: dict[str, Any], *, number: int) -> None:
    seconds, _, losses = zip(*row["curve"], strict=True)
    colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    axes.plot(seconds, losses, color=colour, linestyle=dashes, linewidth=1.6, label=row["strategy"])
