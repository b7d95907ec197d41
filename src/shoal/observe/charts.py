"""The axis of a chart: its range, where a value lies on it, and its ticks. Pure.

Charts of the report: curves as inline SVG, labels as HTML around it.

The SVG is stretched to whatever room the page has (strokes keep their width), while the labels keep the size of text:
so one chart is readable on a telephone and on a wall. Strips over the plot carry the values as hover titles. Colours
come from the page's style sheet, by class. Everything that is text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.observe import figures
from shoal.observe.series import thin

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
MAX_STRIPS = 120


@dataclass(frozen=True)
class Curve:
    """Values over steps. `look` is a class of the style sheet: "faint", "main", "dots", "second"."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    look: str = "main"


@dataclass(frozen=True)
class Level:
    """A horizontal line to compare with."""

    label: str
    value: float


@dataclass(frozen=True)
class Frame:
    """The two axes, and how a value is written."""

    x: Axis
    y: Axis
    form: Callable[[float], str]

    def point(self, step: float, value: float) -> str:
        """A point in the coordinates of the SVG."""
        return f"{self.x.place(step) * WIDTH:.1f},{(1 - self.y.place(value)) * HEIGHT:.1f}"


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    unit: str = "",
    level: Level | None = None,
    from_zero: bool = False,
    may_be_log: bool = False,
    form: Callable[[float], str] = figures.number,
    large: bool = False,
) -> str:
    """A chart of curves over steps; a sentence instead where no curve has a value that can be drawn."""
    heights = drawable(value for curve in curves for value in curve.values)
    steps = [step for curve in curves for step in curve.steps]
    if not heights:
        return f'<figure class="chart">{_caption(title, unit, [], None)}<p class="empty">Not measured.</p></figure>'
    if level is not None:
        heights.append(level.value)
    frame = Frame(_step_axis(steps), axis_for(heights, from_zero=from_zero, may_be_log=may_be_log), form)
    drawn = [_draw(curve, frame) for curve in curves]
    note = f"{unit}, log scale" if frame.y.log and unit else "log scale" if frame.y.log else unit
    return (
        f'<figure class="chart{" large" if large else ""}">{_caption(title, note, curves, level)}'
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(title)}">{_grid(frame)}{"".join(drawn)}{_level(level, frame)}'
        f"{_strips(curves, frame)}</svg>{_labels(frame)}</div></figure>"
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


def _step_axis(steps: Sequence[float]) -> Axis:
    low, high = min(steps), max(steps)
    low = 0 if low < 0.1 * high else low
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def _draw(curve: Curve, frame: Frame) -> str:
    values = [value if drawable([value]) else math.nan for value in curve.values]
    points = thin(curve.steps, values, limit=MAX_POINTS)
    if curve.look == "dots" or len(points) == 1:
        # A stroke of no length with round ends is a dot, and stays round when the SVG is stretched.
        dots = "".join(f"M{frame.point(*point)}h0" for point in points)
        return f'<path class="dots {html.escape(curve.look)}" d="{dots}"/>'
    line = " ".join(frame.point(*point) for point in points)
    return f'<polyline class="curve {html.escape(curve.look)}" points="{line}"/>'


def _grid(frame: Frame) -> str:
    rows = (f"M0,{(1 - frame.y.place(tick)) * HEIGHT:.1f}h{WIDTH}" for tick in frame.y.ticks())
    return f'<path class="grid" d="{"".join(rows)}"/>'


def _level(level: Level | None, frame: Frame) -> str:
    if level is None:
        return ""
    return f'<path class="level" d="M0,{(1 - frame.y.place(level.value)) * HEIGHT:.1f}h{WIDTH}"/>'


def _labels(frame: Frame) -> str:
    rows = "".join(
        f'<span class="y" style="bottom:{frame.y.place(tick) * 100:.2f}%">{html.escape(frame.form(tick))}</span>'
        for tick in frame.y.ticks()
    )
    whole = [tick for tick in frame.x.ticks(4) if tick == round(tick)]
    columns = "".join(
        f'<span class="x" style="left:{frame.x.place(tick) * 100:.2f}%">'
        f"{'step ' if tick == whole[0] else ''}{figures.count(tick)}</span>"
        for tick in whole
    )
    return rows + columns


def _caption(title: str, unit: str, curves: Sequence[Curve], level: Level | None) -> str:
    keys = [(curve.look, curve.label) for curve in curves if curve.label]
    if level is not None:
        keys.append(("level", f"{level.label} {figures.number(level.value)}"))
    legend = "".join(
        f'<span class="key"><i class="{html.escape(look)}"></i>{html.escape(label)}</span>' for look, label in keys
    )
    units = f' <span class="unit">{html.escape(unit)}</span>' if unit else ""
    return f'<figcaption><b>{html.escape(title)}</b>{units}<span class="legend">{legend}</span></figcaption>'


def _strips(curves: Sequence[Curve], frame: Frame) -> str:
    """Invisible columns whose titles give the values of their last step."""
    columns: dict[int, dict[str, tuple[float, float]]] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            column = min(MAX_STRIPS - 1, int(frame.x.place(step) * MAX_STRIPS))
            columns.setdefault(column, {})[curve.label] = (step, value)
    found = sorted(columns)
    edges = [0.0, *((left + right + 1) / 2 for left, right in pairwise(found)), float(MAX_STRIPS)]
    strips = []
    for column, start, end in zip(found, edges[:-1], edges[1:], strict=True):
        size, left = (end - start) / MAX_STRIPS * WIDTH, start / MAX_STRIPS * WIDTH
        text = html.escape(_strip_text(columns[column], frame))
        strips.append(
            f'<rect class="strip" x="{left:.1f}" y="0" width="{size:.1f}" height="{HEIGHT}">'
            f"<title>{text}</title></rect>"
        )
    return "".join(strips)


def _strip_text(values: dict[str, tuple[float, float]], frame: Frame) -> str:
    step = max(step for step, _ in values.values())
    lines = (f"{label} {frame.form(value)}".strip() for label, (_, value) in values.items())
    return "\n".join([f"step {step:.0f}", *lines])
