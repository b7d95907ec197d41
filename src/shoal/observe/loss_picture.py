"""`loss.png`: the loss over the steps, for a slide or a message."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.observe.axis import drawable, wants_log
from shoal.observe.events import series
from shoal.observe.record import Record
from shoal.observe.series import thin
from shoal.observe.summary import Summary, smoothed_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, TEAL, CORAL = "#12242d", "#c9d4d8", "#0b7a75", "#d9532c"
MAX_POINTS = 4000


def loss_picture(record: Record, summary: Summary) -> bytes | None:
    """The picture as PNG; None where no loss was measured that can be drawn."""
    steps, losses = series(record.events, "loss/train")
    eval_steps, eval_losses = series(record.events, "loss/eval")
    heights = drawable([*losses, *eval_losses])
    if not heights:
        return None
    # Half a second of imports that nobody else should wait for; Figure alone leaves pyplot's global state untouched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    _curve(axes, steps, losses, color=SOFT, linewidth=0.8, label="training, each step")
    _curve(axes, steps, smoothed_loss(losses), color=TEAL, linewidth=2, label="training, smoothed")
    _curve(axes, eval_steps, eval_losses, color=CORAL, marker="o", markersize=5, linewidth=1, label="held out")
    if summary.baseline_loss is not None:
        label = f"{summary.baseline_name} {summary.baseline_loss:.3g}"
        axes.axhline(summary.baseline_loss, color=INK, linewidth=1, linestyle=(0, (4, 3)), label=label)
    axes.set_yscale("log" if wants_log(sorted(heights)) else "linear")
    _style(axes, record.name, loss_label=f"loss ({summary.loss_unit})" if summary.loss_unit else "loss")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _curve(axes: Axes, steps: Sequence[float], values: Sequence[float], *, label: str, **look: Any) -> None:
    heights = [value if drawable([value]) else math.nan for value in values]
    if not drawable(heights):
        return
    # A value that is not finite is a gap where all points are drawn.
    few = len(heights) <= MAX_POINTS
    points = list(zip(steps, heights, strict=True)) if few else thin(steps, heights, limit=MAX_POINTS)
    if points:
        if len(points) == 1:
            look.setdefault("marker", "o")
        axes.plot(*zip(*points, strict=True), label=label, **look)


def _style(axes: Axes, title: str, *, loss_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel(loss_label, color=INK, parse_math=False)
    axes.grid(axis="y", color="#e8edef", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.tick_params(colors="#5a6d76", length=0, labelsize=9)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
