"""Charts are well-formed, whatever is drawn, and say nothing that the data did not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observe import charts
from shoal.observe.charts import HEIGHT, WIDTH, Across, Curve, Level, bar, chart

POINTS = st.lists(st.tuples(st.integers(0, 10**15), st.floats(allow_nan=True, allow_infinity=True)), max_size=30)


@settings(max_examples=150, deadline=None)
@given(POINTS, POINTS, st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF)), st.booleans())
def test_any_numbers_make_a_well_formed_chart(
    first: list[tuple[int, float]], second: list[tuple[int, float]], text: str, may_be_log: bool
) -> None:
    """Any floats and any text give XML that parses, without NaN, and with all points inside the frame."""
    curves = [Curve(text, [x for x, _ in sorted(points)], [y for _, y in sorted(points)]) for points in (first, second)]
    markup = chart(text, curves, unit=text, level=Level(text, 2.5), may_be_log=may_be_log)
    ElementTree.fromstring(markup)
    drawn = " ".join(re.findall(r'(?: points| d|style)="([^"]*)"', markup))
    assert "nan" not in drawn
    assert "inf" not in drawn
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", drawn):
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT


def test_a_curve_is_where_its_values_are() -> None:
    """A rising line goes from the lower left to the upper right; a step's hover title has its value."""
    markup = chart("Loss", [Curve("train", [0, 100], [1.0, 2.0])])
    points = re.search(r' d="M([\d.]+),([\d.]+)L([\d.]+),([\d.]+)"', markup)
    assert points is not None
    left, low, right, high = map(float, points.groups())
    assert (left, right) == (0, WIDTH)
    assert low > high
    assert "<title>step 100\ntrain 2</title>" in markup


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    """The line stops before it and begins again behind it; a value alone between two gaps is a dot."""
    values = [1.0, 2.0, math.nan, 1.5, math.inf, 3.0, 4.0]
    markup = chart("Loss", [Curve("train", range(7), values)])
    drawn = re.search(r'class="curve main" d="([^"]*)"', markup)
    assert drawn is not None
    assert re.sub(r"[\d.,]+", "", drawn[1]).replace(" ", "") == "MLMhML"


@pytest.mark.parametrize("look", ["faint", "second"])
def test_curves_of_one_chart_differ_in_colour(look: str) -> None:
    """The style sheet gives the line and its key in the legend another colour than those of "main"."""
    style = (Path(charts.__file__).parent / "page.css").read_text()
    colour = f"var(--{look})"
    for selector in (f".curve.{look}", f".key i.{look}"):
        rule = re.search(rf"^{re.escape(selector)} {{([^}}]*)}}", style, re.MULTILINE)
        assert rule is not None, selector
        assert colour in rule[1]


def test_marks_are_upright_lines_inside_the_plot() -> None:
    """A restart within the curve is drawn, one outside is not; the axis is named."""
    curve = [Curve("train", [0, 100], [1.0, 2.0])]
    markup = chart("Loss", curve, across=Across("tokens", marks=[50, 500]))
    assert f'class="mark" d="M{WIDTH / 2:.1f},0v{HEIGHT}"' in markup
    assert '<span class="across">tokens</span>' in markup
    assert "<title>tokens 100\ntrain 2</title>" in markup
    assert 'class="mark"' not in chart("Loss", curve)


def test_a_single_value_is_a_dot() -> None:
    """One step is drawn, as a dot; a chart of nothing says so."""
    one = chart("Loss", [Curve("train", [1], [2.0]), Curve("held out", [1, 2], [math.nan, 2.0], "second")])
    assert '<path class="dots main"' in one
    assert '<i class="dots main"></i>train' in one, "the legend shows a line"
    assert '<i class="dots second"></i>held out' in one
    assert "Not measured" in chart("Loss", [Curve("train", [1], [math.nan])])
    assert "Not measured" in chart("Loss", [])


@pytest.mark.parametrize("place", ["title", "label", "unit", "level", "bar"])
def test_text_is_escaped(place: str) -> None:
    """A tag in any text stays text."""
    evil = {name: "<script>" if name == place else "x" for name in ("title", "label", "unit", "level", "bar")}
    curves = [Curve(evil["label"], [1, 2], [1.0, 2.0])]
    markup = chart(evil["title"], curves, unit=evil["unit"], level=Level(evil["level"], 1.0))
    markup += bar([("data", evil["bar"], 0.5)])
    assert "<script>" not in markup
    assert "&lt;script&gt;" in markup


def test_a_bar_is_divided_by_its_amounts() -> None:
    """Widths are the shares of the whole; parts of nothing are left out."""
    markup = bar([("data", "a", 1.0), ("optimizer", "b", 0.0), ("other", "c", 3.0)], whole=4.0)
    assert re.findall(r"width:([\d.]+)%", markup) == ["25.00", "75.00"]
