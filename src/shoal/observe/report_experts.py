"""The report's part on mixtures of experts: who is loaded how much, how unevenly, and what found no room.

The load of each expert over the steps is a heat map: rows of cells as inline SVG, a class of the style sheet for each
shade, with the experts' numbers, the steps and the scale written beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from shoal import units
from shoal.observe.charts import Across, Curve, Level, chart
from shoal.observe.events import series
from shoal.observe.record import LayerLoads, Record
from shoal.observe.tables import section, table

SHADES = 9
MAX_COLUMNS = 60
MAX_ROW_LABELS = 8
MAX_MAPS = 6
"""Mixtures that are drawn; of more, the least even ones."""
HOTTEST = 2.0
"""Times the mean load, at which a cell has the darkest shade."""


def expert_section(record: Record, across: Across) -> str:
    """Curves of the imbalance and of dropped tokens, then each mixture's experts over the steps; "" without any."""
    curves = _imbalance(record, across) + _dropped(record, across)
    if not curves:
        return ""
    layers = sorted(record.expert_loads, key=lambda layer: -layer.imbalance)
    drawn = "".join(_map(layer) for layer in layers[:MAX_MAPS])
    body = f'<div class="grid-of-charts">{curves}</div><div class="grid-of-charts">{drawn}</div>'
    return section("Experts", body + (_table(layers[:MAX_MAPS]) if layers else ""), lead=_lead(layers))


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


def _lead(layers: list[LayerLoads]) -> str:
    if not layers:
        return "The load of single experts was not recorded (observe.expert_loads_every_steps = 0)."
    shown = f" The {MAX_MAPS} least even of {len(layers)} mixtures are shown." if len(layers) > MAX_MAPS else ""
    return f"A row for each expert, steps to the right. The darker, the more tokens chose it.{shown}"


def _imbalance(record: Record, across: Across) -> str:
    worst, average = (series(record.events, f"moe/load_max_over_mean{end}") for end in ("", "_average"))
    if not worst[0]:
        return ""
    curves = [Curve("worst mixture", *worst, "faint"), Curve("average", *average)]
    title = f"Busiest expert over mean, mixtures of rank {record.lead_rank}"
    return chart(title, curves, across=across, level=Level("even", 1.0))


def _dropped(record: Record, across: Across) -> str:
    dropped = series(record.events, "moe/dropped_share")
    if not dropped[0]:
        return ""
    curve = [Curve("", *dropped)]
    return chart("Choices without room", curve, across=across, from_zero=True, form=units.percent)


def _map(layer: LayerLoads) -> str:
    shares = [[tokens * layer.experts / sum(row) for tokens in row] for row in layer.tokens]
    rows = [list(column) for column in zip(*shares, strict=True)]
    labels = [f"expert {e}: {sum(row) / len(row):.2f} times the mean load" for e, row in enumerate(rows)]
    picture = heat_map(f"Load of the experts of {layer.name}", rows, hottest=HOTTEST, labels=labels)
    title = f"{layer.name}, {units.plural(layer.experts, 'expert')}"
    legend = "".join(f'<i class="h{shade}"></i>' for shade in range(0, SHADES, 2))
    scale = f'<span class="scale">0{legend}{HOTTEST:g} × mean or more</span>'
    caption = f'<figcaption><b>{escape(title)}</b><span class="legend">{scale}</span></figcaption>'
    body = f'<div class="map">{_expert_numbers(layer.experts)}{picture}{_steps(layer)}</div>'
    return f'<figure class="chart">{caption}{body}</figure>'


def _expert_numbers(experts: int) -> str:
    """Numbers beside the rows, at most `MAX_ROW_LABELS` of them, and what they number."""
    stride = -(-experts // MAX_ROW_LABELS)
    numbers = "".join(
        f'<span class="y" style="top:{100 * (expert + 0.5) / experts:.2f}%">{expert}</span>'
        for expert in range(0, experts, stride)
    )
    return f'{numbers}<span class="expert">expert</span>'


def _steps(layer: LayerLoads) -> str:
    first, last = layer.steps[0], layer.steps[-1]
    return f'<span class="x first">step {first:,}</span><span class="x last">step {last:,}</span>'


def _table(layers: list[LayerLoads]) -> str:
    columns = ("mixture", "busiest expert", "its load / mean", "idlest expert", "its load / mean")
    return table(columns, map(_row, layers))


def _row(layer: LayerLoads) -> tuple[str, ...]:
    totals = layer.totals
    mean = sum(totals) / len(totals)
    most, least = totals.index(max(totals)), totals.index(min(totals))
    return (layer.name, str(most), f"{totals[most] / mean:.2f}", str(least), f"{totals[least] / mean:.2f}")
