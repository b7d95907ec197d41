"""Heat maps of the report: rows of cells as inline SVG, a class of the style sheet for each shade."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

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
