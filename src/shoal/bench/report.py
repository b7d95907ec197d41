"""What a benchmark reports: its rows, the checks of promised figures, and the machine, as text or as JSON.

The JSON is one object, `{"bench": ..., "machine": {...}, "rows": [...], "checks": [...]}`. A check is
`{"name": ..., "value": ..., "bound": ..., "holds": true}`. A check that does not hold changes no exit code.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shoal.bench.table import tables
from shoal.standard_output import answer

Row = dict[str, Any]
Check = dict[str, Any]
Result = dict[str, list[dict[str, Any]]]
"""`{"rows": [...], "checks": [...]}`."""


def check(name: str, value: float, bound: float, *, at_most: bool = False) -> Check:
    """A promised figure: `value` must be at least `bound`, or `at_most` that."""
    holds = value <= bound if at_most else value >= bound
    return {"name": name, "value": round(value, 4), "bound": bound, "holds": holds}


def merged(results: Iterable[Result]) -> Result:
    """The rows and checks of several results in one."""
    parts = list(results)
    return {key: [entry for part in parts for entry in part[key]] for key in ("rows", "checks")}


def print_report(name: str, result: Result, *, as_json: bool) -> None:
    """Prints the result of the benchmark `name`: tables for people, or one JSON object."""
    rows, checks = result["rows"], result["checks"]
    if as_json:
        answer(json.dumps({"bench": name, "machine": machine_facts(), "rows": rows, "checks": checks}))
        return
    for table in tables(rows):
        print(table, end="\n\n")
    for one in checks:
        print(f"{'holds' if one['holds'] else 'SHORT'}  {one['name']}: {one['value']} (bound {one['bound']})")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory in bytes, and the versions of Python, torch and Shoal."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    total_kib = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(total_kib) * 1024,
        "python": platform.python_version(),
        "torch": version("torch"),
        "shoal": version("shoal"),
    }


def _lines(path: str) -> list[str]:
    """No lines where the system has no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
