"""Charts of the report: curves as inline SVG, labels as HTML around it.

The SVG is stretched to whatever room the page has (strokes keep their width), while the labels keep the size of text:
so one chart is readable on a phone and on a wall. Columns over the plot carry the values as hover titles. Colours come
from the page's style sheet, by class. Everything that is text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal import units
from shoal.observe.axis import Axis, axis_for, drawable
from shoal.observe.series import thin

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
        return f'<figure class="chart">{_caption(title, unit, [], None)}<p class="empty">Not measured.</p></figure>'
    if level is not None:
        heights.append(level.value)
    y = axis_for(heights, from_zero=from_zero, may_be_log=may_be_log)
    frame = _Frame(_across_axis(places), y, form, across or Across())
    drawn = "".join(_draw(curve, frame) for curve in curves)
    note = ", ".join(word for word in (unit, "log scale" if y.log else "") if word)
    return (
        f'<figure class="chart{" large" if large else ""}">{_caption(title, note, curves, level)}'
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


def _caption(title: str, unit: str, curves: Sequence[Curve], level: Level | None) -> str:
    keys = [(curve.look, curve.label) for curve in curves if curve.label]
    if level is not None:
        keys.append(("level", f"{level.label} {units.number(level.value)}"))
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
