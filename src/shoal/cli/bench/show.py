"""A benchmark's result as text, or as the one JSON object that scripts read."""

from __future__ import annotations

import json
from typing import Any


def show(name: str, rows: list[dict[str, Any]], checks: list[dict[str, Any]], as_json: bool) -> None:
    """`rows` are the measurements, `checks` the figures that the project has promised."""
    from shoal.recipes.benchmarks.machine import machine

    if as_json:
        print(json.dumps({"bench": name, "machine": machine(), "rows": rows, "checks": checks}))
        return
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    for check in checks:
        print(f"{'holds' if check['holds'] else 'SHORT'}  {check['name']}: {check['value']} (bound {check['bound']})")
