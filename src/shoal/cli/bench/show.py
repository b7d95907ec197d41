"""A benchmark's result as text, or as the one JSON object that scripts read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any


def show(name: str, rows: list[dict[str, Any]], checks: list[dict[str, Any]], as_json: bool) -> None:
    """`rows` are the measurements, `checks` the figures that the project has promised."""
    from shoal.recipes.benchmarks.machine import machine

    if as_json:
        print(json.dumps({"bench": name, "machine": machine(), "rows": rows, "checks": checks}))
        return
    for keys, alike in groupby(rows, key=tuple):
        print("\n".join(_table(keys, list(alike))), end="\n\n")
    for check in checks:
        print(f"{'holds' if check['holds'] else 'SHORT'}  {check['name']}: {check['value']} (bound {check['bound']})")


def _table(keys: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Rows of the same keys under one heading; a row alone as a list, where it is too wide for a line."""
    cells = [[str(key) for key in keys], *([str(row[key]) for key in keys] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(keys))]
    if len(rows) == 1 and sum(widths) + 2 * len(widths) > 120:
        return [f"{key:<{max(map(len, keys))}}  {row}" for key, row in zip(keys, cells[1], strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells]
