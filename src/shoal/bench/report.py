"""What a benchmark reports: its rows, the checks of promised figures, and the machine, as text or as JSON.

The JSON is one object, `{"bench": ..., "machine": {...}, "rows": [...], "checks": [...]}`. A check is
`{"name": ..., "value": ..., "bound": ..., "holds": true}`. A check that does not hold changes no exit code.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from shoal import units
from shoal.launcher.devices import cores
from shoal.launcher.environment import place_from
from shoal.observe.terminal import ProgressBar, open_progress_bar
from shoal.standard_output import answer

# The rows of a benchmark as people read them: headings in words, figures with the unit that suits.
#
# The last part of a row's key says what its figure is. The heading leaves it out, and the figure has its unit:
#
#     ..._s, _ms, _us         a time             time_us: 1450.2          time            1.45 ms
#     ..._bytes               a size             ledger_bytes: 1048576    ledger          1 MiB
#     ..._gb_s, and others    a rate             busbw_gb_s: 0.0031       bus bandwidth   3.1 MB/s
#     ..._lower_95            a bound            ratio_lower_95: 1.02     ratio, 95 % bound
#     ..._spread              two percentiles    aa_spread: [0.98, 1.01]  A/A spread      0.98 to 1.01
#
# What was not measured (None) is a dash. In JSON the rows stay as they were measured.


WIDEST_LINE, FEW_ROWS = 120, 6
NOTHING = "-"
BETWEEN = "  "
_BYTES, _PER_S = "_bytes", "_per_s"
_TIMES_S = {"_ms": 1e-3, "_us": 1e-6, "_s": 1.0}
_AMOUNTS_BYTES = {"_gb_s": (1e9, "/s"), "_mb_s": (1e6, "/s"), "_gb": (1e9, ""), "_mb": (1e6, "")}
_RATES = {"_gflops_s": "GFLOP/s", "_mbit_s": "Mbit/s", "_mbit": "Mbit/s"}
_WORDS = {
    "aa": "A/A",
    "algbw": "bandwidth",
    "alpha": "start-up (alpha)",
    "beta": "per byte (beta)",
    "busbw": "bus bandwidth",
    "ddp": "DDP",
    "gloo": "Gloo",
    "memcpy": "memcpy",
    "worst off": "worst point off the fit",
    "zero 1": "ZeRO-1",
    "twin": "again",
}
_ENDINGS = {"_lower_95": ", 95 % bound", "_median": ", median"}


def tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table for each run of rows with the same keys: a line a row, or a column a row where lines would be too long
    and rows are few."""
    for keys, group in groupby(rows, key=tuple):
        yield "\n".join(_table(keys, list(group)))


def heading(key: str) -> str:
    """The words of a row's key, without the unit that its figures have."""
    for ending, words in _ENDINGS.items():
        if key.endswith(ending):
            return heading(key.removesuffix(ending)) + words
    ending = _unit_of(key)
    text = f"_{key}".removesuffix(ending).replace("_", " ").strip()
    text = text or ("size" if ending == _BYTES else "time" if ending in _TIMES_S else "rate")
    if ending == _PER_S:
        text += " a second"
    for found, word in _WORDS.items():
        text = re.sub(rf"\b{found}\b", word, text)
    return text


def cell(key: str, value: Any) -> str:
    """The figure of a row's key."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        between = " to " if key.endswith("_spread") else ", "
        return between.join(cell(key, one) for one in value) or NOTHING
    if not isinstance(value, int | float):
        return str(value)
    return _form(key)(value)


def _unit_of(key: str) -> str:
    """The ending that names a unit; empty where the key has none."""
    return next(
        (ending for ending in (*_AMOUNTS_BYTES, *_RATES, _PER_S, *_TIMES_S, _BYTES) if f"_{key}".endswith(ending)), ""
    )


def _form(key: str) -> Callable[[float], str]:
    ending = _unit_of(key)
    if ending in _AMOUNTS_BYTES:
        factor, each = _AMOUNTS_BYTES[ending]
        return lambda value: units.byte_size(value * factor) + each
    if ending in _RATES:
        return lambda value: f"{_plain(value)} {_RATES[ending]}"
    if ending in _TIMES_S:
        return lambda value: units.seconds(value * _TIMES_S[ending])
    return units.memory_size if ending == _BYTES else _plain


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else units.number(value)


def _table(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What all rows have in common stands above them once."""
    common = [key for key in keys if len(rows) > 1 and all(row[key] == rows[0][key] for row in rows)]
    own = [key for key in keys if key not in common]
    if common and own:
        yield "; ".join(f"{heading(key)}: {cell(key, rows[0][key])}" for key in common)
    columns = [[heading(key), *(cell(key, row[key]) for row in rows)] for key in own or keys]
    left = {at for at, key in enumerate(own or keys) if all(isinstance(row[key], str) for row in rows)}
    width = sum(_width(column) + len(BETWEEN) for column in columns)
    if width <= WIDEST_LINE or len(rows) > FEW_ROWS:
        yield from _table_lines(list(zip(*columns, strict=True)), left=left)
    else:
        yield from _table_lines(columns, left={0})


def _table_lines(lines: Sequence[Sequence[str]], *, left: set[int]) -> Iterator[str]:
    """Columns as wide as their widest cell; those in `left` begin at the left, the others end at the right."""
    widths = [_width(column) for column in zip(*lines, strict=True)]
    for line in lines:
        aligned = (
            f"{text:<{width}}" if at in left else f"{text:>{width}}"
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        yield BETWEEN.join(aligned).rstrip()


def _width(column: Sequence[str]) -> int:
    return max(len(text) for text in column)


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
        "cores": cores(),
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


# How far a benchmark has come: its ranks say it, the process that the user started shows it.
#
# Rank 0 writes a line for each part of the work to a pipe in the benchmark's folder (`tell`); a thread of the user's
# process reads them and moves a bar on standard error (`shown`). Nobody waits for a reader: what does not fit is
# dropped.


PIPE = "SHOAL_BENCH_PROGRESS"
"""The variable that names the pipe to the ranks."""
T = TypeVar("T")


def tell(text: str, *, done: int = 0, total: int = 0) -> None:
    """This rank is now at `text`; `done` of `total` parts are behind it (a total of 0: not known).

    Does nothing outside of a benchmark and on ranks other than 0.
    """
    path, place = os.environ.get(PIPE), place_from(os.environ)
    if path is None or place is None or place.rank != 0:
        return
    with suppress(OSError):  # nobody reads, or the pipe is full
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, (json.dumps([text, done, total]) + "\n").encode())
        finally:
            os.close(descriptor)


def told(items: Iterable[T], text: str, *, total: int = 0) -> Iterator[T]:
    """`items` as they are; how many of them are done is told each time that one is asked for."""
    for done, item in enumerate(items):
        tell(text, done=done, total=total)
        yield item


@contextmanager
def shown(part: str, folder: Path) -> Iterator[dict[str, str]]:
    """Shows what ranks tell until the end of the block, after `part`. Gives what their environment needs for it."""
    path = folder / "progress"
    os.mkfifo(path)
    own = os.open(path, os.O_RDWR)  # with a writer of its own, the pipe does not end between two lines
    with open_progress_bar(sys.stderr) as bar:
        bar.update(part)
        thread = threading.Thread(target=_show, args=(own, part, bar), name="shoal-bench-progress", daemon=True)
        thread.start()
        try:
            yield {PIPE: str(path)}
        finally:
            os.write(own, b"\n")  # the end
            thread.join()
            os.close(own)


def _show(descriptor: int, part: str, bar: ProgressBar) -> None:
    with os.fdopen(os.dup(descriptor)) as lines:
        for line in lines:
            if line == "\n":
                return
            text, done, total = json.loads(line)
            bar.update(f"{part}: {text}", done=done, total=total)


# The statistics of paired measurements: two ways of doing one thing, in turn, many times, on a noisy machine.
#
# The ratio within each pair is compared, so that a slow minute slows both sides. The bound of its median assumes no
# distribution. The number of pairs above the median is binomial, so that the k-th smallest ratio with
#
#     k = n/2 - 1.645 sqrt(n)/2
#
# lies below the median with 95 % confidence (the one-sided bound of the sign test). An A/A measurement, of two sides
# that do the same, shows how far noise alone moves a ratio.


ONE_SIDED_95 = 1.645

Turns = list[dict[str, float]]
"""Seconds of a step by side, turn by turn."""


def ratios(turns: Turns, side: str, *, peer: str) -> list[float]:
    """How many times as fast as `peer` the `side` was, in each turn that has both."""
    return [turn[peer] / turn[side] for turn in turns if side in turn and peer in turn]


def lower_bound(values: Sequence[float]) -> float:
    """The 95 % lower bound of the median of `values`."""
    ordered = sorted(values)
    index = math.floor(len(ordered) / 2 - ONE_SIDED_95 * math.sqrt(len(ordered)) / 2)
    return ordered[max(0, index - 1)]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    ordered = sorted(values)
    return ordered[int(0.05 * (len(ordered) - 1))], ordered[math.ceil(0.95 * (len(ordered) - 1))]


def columns(turns: Turns) -> dict[str, list[float]]:
    """Seconds by side, of the turns that have the side."""
    sides = dict.fromkeys(side for turn in turns for side in turn)
    return {side: [turn[side] for turn in turns if side in turn] for side in sides}


def milliseconds(times_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each column, ms, as cells of a row."""
    return {f"{name}_ms": round(1e3 * statistics.median(values), 2) for name, values in times_s.items() if values}


def again_cells(values: Sequence[float]) -> dict[str, object]:
    """The ratios of an A/A measurement as cells of a row: median and spread."""
    return {
        "aa_median": round(statistics.median(values), 4),
        "aa_spread": [round(value, 4) for value in spread(values)],
    }
