"""Numbers as people read them: three or four digits that count, and a unit. Pure."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """A plain number: 2.041, 0.0003, 3e-06."""
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def loss(value: float) -> str:
    """A loss, four digits, zeros kept so that a column lines up: 2.040, 0.001250."""
    return f"{value:#.4g}" if math.isfinite(value) else "not finite"


def count(value: float) -> str:
    """How many: 912, 14.2k, 0.912M of things."""
    for bound, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound * 0.9995:
            return f"{value / bound:.3g}{letter}"
    return f"{value:.3g}" if value % 1 else f"{value:.0f}"


def byte_size(value: float) -> str:
    """Bytes in powers of a thousand: 912 B, 3.65 MB."""
    text = count(value)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def duration(seconds: float) -> str:
    """A span of time: 182 ms, 42 s, 2 min 05 s, 3 h 12 min, 2 d 03 h."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return milliseconds(seconds)
    whole = round(seconds)
    for size_s, name, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size_s:
            return f"{whole // size_s} {name} {whole % size_s // part_s:02d} {part}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def milliseconds(seconds: float) -> str:
    """A short span in milliseconds: 182 ms, 3.42 ms, 0.05 ms."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} ms"


def percent(share: float) -> str:
    """A share of one: 4.1 %, 73 %."""
    value = share * 100
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %"
