"""Charts of the report: curves as inline SVG, labels as HTML around it.

The SVG is stretched to whatever room the page has (strokes keep their width), while the labels keep the size of text:
so one chart is readable on a phone and on a wall. Columns over the plot carry the values as hover titles. Colours come
from the page's style sheet, by class. Everything that is text is escaped here.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shoal import units
from shoal.observe.events import series, thin
from shoal.observe.record import Record
from shoal.observe.summary import Summary, smoothed_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The axis of a chart: its range, where a value lies on it, and its ticks. Pure.


LOG_RATIO = 12.0
"""Values whose bulk spans more than this ratio are drawn on a logarithmic axis, where the chart allows it."""

LARGEST = 1e150
"""Larger values are not drawn: the arithmetic of an axis would overflow."""


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`; values outside are moved to the nearer end."""
        if self.log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values on the axis."""
        if self.log and self.high / self.low >= 10:
            return _log_ticks(self.low, self.high, count)
        return _linear_ticks(self.low, self.high, count)


def drawable(values: Iterable[float]) -> list[float]:
    """The values that can be drawn."""
    return [value for value in values if abs(value) <= LARGEST]


def axis_for(values: Sequence[float], *, from_zero: bool = False, may_be_log: bool = False) -> Axis:
    """An axis that holds all values with some air; one around a single value; 0 to 1 for none."""
    numbers = sorted(drawable(values))
    if not numbers:
        return Axis(0.0, 1.0)
    low, high = numbers[0], numbers[-1]
    if may_be_log and wants_log(numbers):
        air = (high / low) ** 0.04
        return Axis(low / air, high * air, log=True)
    if from_zero:
        low = min(0.0, low)
    air = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    return Axis(low if low == 0 and from_zero else low - air, high + air)


def wants_log(ordered: Sequence[float]) -> bool:
    """Do ascending values, the outermost fiftieth left out, span so much that a linear axis hides the small ones?"""
    if not ordered or ordered[0] <= 1e-150:
        return False
    edge = len(ordered) // 50
    return ordered[-1 - edge] / ordered[edge] > LOG_RATIO


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    step = _round_step((high - low) / max(1, count))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, min(last, first + 4 * count) + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= step * 0.7)


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / count))
    powers = [10.0**power for power in range(first, last + 1, stride)]
    if len(powers) >= 3:
        return powers
    between = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
    return [value for value in between if low <= value <= high]


WIDTH, HEIGHT = 1000, 400
MAX_POINTS = 800
MAX_COLUMNS = 120


@dataclass(frozen=True)
class Curve:
    """Values over steps, or over what else the horizontal axis shows, ascending.

    A value that is not finite leaves a gap. `look` is a class of the style sheet: "faint", "main", "dots", "second".
    """

    label: str
    places: Sequence[float]
    values: Sequence[float]
    look: str = "main"


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    label: str
    value: float


@dataclass(frozen=True)
class Across:
    """The horizontal axis: what it counts, how a place on it is written, and places that are marked (restarts)."""

    name: str = "step"
    form: Callable[[float], str] = units.count
    marks: Sequence[float] = ()
    whole: bool = True
    """Ticks are whole numbers."""

    def text(self, place: float) -> str:
        """A place in full, for hover titles."""
        return f"{self.name} {place:,.0f}" if self.whole else f"{self.form(place)} {self.name}"


@dataclass(frozen=True)
class _Frame:
    """The two axes, and how a value is written."""

    x: Axis
    y: Axis
    form: Callable[[float], str]
    across: Across

    def point(self, place: float, value: float) -> str:
        """A point in the coordinates of the SVG."""
        return f"{self.x.place(place) * WIDTH:.1f},{(1 - self.y.place(value)) * HEIGHT:.1f}"


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    across: Across | None = None,
    unit: str = "",
    level: Level | None = None,
    from_zero: bool = False,
    may_be_log: bool = False,
    form: Callable[[float], str] = units.number,
    large: bool = False,
) -> str:
    """A chart of curves; a sentence instead where no curve has a value that can be drawn."""
    heights = drawable(value for curve in curves for value in curve.values)
    places = [place for curve in curves for place in curve.places]
    if not heights:
        return (
            f'<figure class="chart">{_caption(title, unit, [], None, form)}<p class="empty">Not measured.</p></figure>'
        )
    if level is not None:
        heights.append(level.value)
    y = axis_for(heights, from_zero=from_zero, may_be_log=may_be_log)
    frame = _Frame(_across_axis(places), y, form, across or Across())
    drawn = "".join(_draw(curve, frame) for curve in curves)
    note = ", ".join(word for word in (unit, "log scale" if y.log else "") if word)
    return (
        f'<figure class="chart{" large" if large else ""}">{_caption(title, note, curves, level, form)}'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{_grid(frame)}{_marks(frame)}{drawn}{_level(level, frame)}'
        f"{_columns(curves, frame)}</svg>{_labels(frame)}</div></figure>"
    )


def bar(parts: Sequence[tuple[str, str, float]], *, whole: float = 1.0) -> str:
    """A stacked bar of (class, hover text, amount); the empty rest up to `whole` stays open."""
    spans = (
        f'<span class="fill {name}" style="width:{100 * min(1.0, amount / whole):.2f}%" '
        f'title="{html.escape(text)}"></span>'
        for name, text, amount in parts
        if amount > 0 and whole > 0
    )
    return f'<div class="bar">{"".join(spans)}</div>'


def _across_axis(places: Sequence[float]) -> Axis:
    low, high = min(places), max(places)
    low = 0 if low < 0.1 * high else low
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _draw(curve: Curve, frame: _Frame) -> str:
    pieces = list(_pieces(curve))
    points = sum(map(len, pieces))
    if curve.look == "dots" or points == 1:
        # A stroke of no length with round ends is a dot, and stays round when the SVG is stretched.
        dots = "".join(f"M{frame.point(*point)}h0" for piece in pieces for point in piece)
        return f'<path class="dots {html.escape(curve.look)}" d="{dots}"/>'
    lines = []
    for piece in pieces:
        start, *rest = thin(*zip(*piece, strict=True), limit=max(2, MAX_POINTS * len(piece) // points))
        lines.append(f"M{frame.point(*start)}" + ("L" + " ".join(frame.point(*p) for p in rest) if rest else "h0"))
    return f'<path class="curve {html.escape(curve.look)}" d="{"".join(lines)}"/>'


def _mark(curve: Curve) -> str:
    """The classes of what stands for the curve in the legend: a dot where it has one point, as `_draw` draws it."""
    return curve.look if len(drawable(curve.values)) != 1 else f"dots {curve.look}"


def _pieces(curve: Curve) -> Iterator[list[tuple[float, float]]]:
    """The stretches of a curve between values that cannot be drawn."""
    piece: list[tuple[float, float]] = []
    for place, value in zip(curve.places, curve.values, strict=True):
        if drawable([value]):
            piece.append((place, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _grid(frame: _Frame) -> str:
    rows = (f"M0,{(1 - frame.y.place(tick)) * HEIGHT:.1f}h{WIDTH}" for tick in frame.y.ticks())
    return f'<path class="grid" d="{"".join(rows)}"/>'


def _marks(frame: _Frame) -> str:
    lines = "".join(
        f"M{frame.x.place(at) * WIDTH:.1f},0v{HEIGHT}" for at in frame.across.marks if frame.x.low <= at <= frame.x.high
    )
    return f'<path class="mark" d="{lines}"/>' if lines else ""


def _level(level: Level | None, frame: _Frame) -> str:
    if level is None:
        return ""
    return f'<path class="level" d="M0,{(1 - frame.y.place(level.value)) * HEIGHT:.1f}h{WIDTH}"/>'


def _labels(frame: _Frame) -> str:
    rows = "".join(
        f'<span class="y" style="bottom:{frame.y.place(tick) * 100:.2f}%">{html.escape(frame.form(tick))}</span>'
        for tick in frame.y.ticks()
    )
    ticks = [tick for tick in frame.x.ticks(4) if tick == round(tick) or not frame.across.whole]
    columns = "".join(
        f'<span class="x" style="left:{frame.x.place(tick) * 100:.2f}%">{html.escape(frame.across.form(tick))}</span>'
        for tick in ticks
    )
    return f'{rows}{columns}<span class="across">{html.escape(frame.across.name)}</span>'


def _caption(title: str, unit: str, curves: Sequence[Curve], level: Level | None, form: Callable[[float], str]) -> str:
    keys = [(_mark(curve), curve.label) for curve in curves if curve.label]
    if level is not None:
        keys.append(("level", f"{level.label} {form(level.value)}"))
    legend = "".join(
        f'<span class="key"><i class="{html.escape(look)}"></i>{html.escape(label)}</span>' for look, label in keys
    )
    shown = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    return f'<figcaption><b>{html.escape(title)}</b>{shown}<span class="legend">{legend}</span></figcaption>'


def _columns(curves: Sequence[Curve], frame: _Frame) -> str:
    """Invisible columns whose titles give the values of their last place."""
    columns: dict[int, dict[str, tuple[float, float]]] = {}
    for curve in curves:
        for place, value in zip(curve.places, curve.values, strict=True):
            column = min(MAX_COLUMNS - 1, int(frame.x.place(place) * MAX_COLUMNS))
            columns.setdefault(column, {})[curve.label] = (place, value)
    found = sorted(columns)
    edges = [0.0, *((left + right + 1) / 2 for left, right in pairwise(found)), float(MAX_COLUMNS)]
    drawn = []
    for column, start, end in zip(found, edges[:-1], edges[1:], strict=True):
        size, left = (end - start) / MAX_COLUMNS * WIDTH, start / MAX_COLUMNS * WIDTH
        text = html.escape(_column_text(columns[column], frame))
        box = f'x="{left:.1f}" y="0" width="{size:.1f}" height="{HEIGHT}"'
        drawn.append(f'<rect class="strip" {box}><title>{text}</title></rect>')
    return "".join(drawn)


def _column_text(values: dict[str, tuple[float, float]], frame: _Frame) -> str:
    place = max(place for place, _ in values.values())
    lines = (
        f"{label} {frame.form(value) if math.isfinite(value) else 'not finite'}".strip()
        for label, (_, value) in values.items()
    )
    return "\n".join([frame.across.text(place), *lines])


# `loss.png`: the loss over the steps, for a slide or a message.


INK, SOFT, TEAL, CORAL = "#12242d", "#c9d4d8", "#0b7a75", "#d9532c"
MAX_PICTURE_POINTS = 4000


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
    few = len(heights) <= MAX_PICTURE_POINTS
    points = list(zip(steps, heights, strict=True)) if few else thin(steps, heights, limit=MAX_PICTURE_POINTS)
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
