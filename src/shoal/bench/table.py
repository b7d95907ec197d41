"""The rows of a benchmark as people read them: headings in words, figures with the unit that suits.

The last part of a row's key says what its figure is. The heading leaves it out, and the figure has its unit:

    ..._s, _ms, _us         a time             time_us: 1450.2          time            1.45 ms
    ..._bytes               a size             ledger_bytes: 1048576    ledger          1 MiB
    ..._gb_s, and others    a rate             busbw_gb_s: 0.0031       bus bandwidth   3.1 MB/s
    ..._lower_95            a bound            ratio_lower_95: 1.02     ratio, 95 % bound
    ..._spread              two percentiles    aa_spread: [0.98, 1.01]  A/A spread      0.98 to 1.01

What was not measured (None) is a dash. In JSON the rows stay as they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from shoal import units

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
        yield from _lines(list(zip(*columns, strict=True)), left=left)
    else:
        yield from _lines(columns, left={0})


def _lines(lines: Sequence[Sequence[str]], *, left: set[int]) -> Iterator[str]:
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
