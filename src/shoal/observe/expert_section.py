"""Heat maps of the report: rows of cells as inline SVG, a class of the style sheet for each shade.

The report's part on mixtures of experts: who is loaded how much, how unevenly, and what found no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from shoal.observe import figures
from shoal.observe.breakdown import section, table
from shoal.observe.charts import Curve, Level, chart
from shoal.observe.events import series
from shoal.observe.expert_loads import LayerLoads
from shoal.observe.record import Record

SHADES = 9
MAX_COLUMNS = 60


def heat_map(title: str, rows: Sequence[Sequence[float]], *, hottest: float, labels: Sequence[str]) -> str:
    """Cells `rows[y][x]` from 0 (the lightest shade) to `hottest` and above (the darkest); a hover text for each row.

    Longer rows are shown by the means of neighbours. All rows are equally long.
    """
    cells = [_shortened(row) for row in rows]
    width, height = len(cells[0]), len(cells)
    paths = []
    for shade in range(SHADES):
        places = [f"M{x},{y}h1v1h-1z" for y, row in enumerate(cells) for x, value in enumerate(row)
                  if _shade(value, hottest) == shade]  # fmt: skip
        paths.append(f'<path class="heat h{shade}" d="{"".join(places)}"/>' if places else "")
    strips = (
        f'<rect class="strip" x="0" y="{y}" width="{width}" height="1"><title>{escape(label)}</title></rect>'
        for y, label in enumerate(labels)
    )
    return (
        f'<svg class="heats" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(paths)}{"".join(strips)}</svg>'
    )


def _shade(value: float, hottest: float) -> int:
    return min(SHADES - 1, round((SHADES - 1) * value / hottest))


def _shortened(row: Sequence[float]) -> list[float]:
    if len(row) <= MAX_COLUMNS:
        return list(row)
    edges = [index * len(row) // MAX_COLUMNS for index in range(MAX_COLUMNS + 1)]
    return [sum(row[a:b]) / (b - a) for a, b in pairwise(edges)]


MAX_MAPS = 6
"""Mixtures that are drawn; of more, the least even ones."""
HOTTEST = 2.0
"""Times the mean load, at which a cell has the darkest shade."""


def expert_section(record: Record) -> str:
    """Curves of the imbalance and of dropped tokens, then each mixture's experts over the steps; "" without any."""
    curves = _imbalance(record) + _dropped(record)
    if not curves:
        return ""
    layers = sorted(record.expert_loads, key=lambda layer: -layer.imbalance)
    drawn = "".join(_map(layer) for layer in layers[:MAX_MAPS])
    body = f'<div class="grid-of-charts">{curves}</div><div class="grid-of-charts">{drawn}</div>'
    return section("Experts", body + (_table(layers[:MAX_MAPS]) if layers else ""), lead=_lead(layers))


def _lead(layers: list[LayerLoads]) -> str:
    if not layers:
        return "The load of single experts was not recorded (observe.expert_loads_every_steps = 0)."
    shown = f" The {MAX_MAPS} least even of {len(layers)} mixtures are shown." if len(layers) > MAX_MAPS else ""
    return (
        "A row for each expert, steps to the right. The darker, the more tokens chose it; the darkest shade is twice "
        f"the mean or more.{shown}"
    )


def _imbalance(record: Record) -> str:
    worst, average = (series(record.events, f"moe/load_max_over_mean{end}") for end in ("", "_average"))
    if not worst[0]:
        return ""
    curves = [Curve("worst mixture", *worst, "faint"), Curve("average", *average)]
    return chart(f"Busiest expert over mean, mixtures of rank {record.lead_rank}", curves, level=Level("even", 1.0))


def _dropped(record: Record) -> str:
    dropped = series(record.events, "moe/dropped_share")
    if not dropped[0]:
        return ""
    return chart("Choices without room", [Curve("", *dropped)], from_zero=True, form=figures.percent)


def _map(layer: LayerLoads) -> str:
    shares = [[tokens * layer.experts / sum(row) for tokens in row] for row in layer.tokens]
    rows = [list(column) for column in zip(*shares, strict=True)]
    labels = [f"expert {e}: {sum(row) / len(row):.2f} times the mean load" for e, row in enumerate(rows)]
    title = f"{layer.name}, {layer.experts} experts"
    span = f"steps {layer.steps[0]:,} to {layer.steps[-1]:,}"
    picture = heat_map(f"Load of the experts of {layer.name}", rows, hottest=HOTTEST, labels=labels)
    caption = f'<figcaption><b>{escape(title)}</b><span class="unit">{span}</span></figcaption>'
    return f'<figure class="chart">{caption}{picture}</figure>'


def _table(layers: list[LayerLoads]) -> str:
    cells = ("busiest expert", "its load / mean", "idlest", "its load / mean")
    head = "<tr><th>mixture</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return table(head, "".join(_row(layer) for layer in layers))


def _row(layer: LayerLoads) -> str:
    totals = layer.totals
    mean = sum(totals) / len(totals)
    most, least = totals.index(max(totals)), totals.index(min(totals))
    cells = (str(most), f"{totals[most] / mean:.2f}", str(least), f"{totals[least] / mean:.2f}")
    return f"<tr><th>{escape(layer.name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
