"""Numbers as people read them: three or four significant digits, and the unit that suits. Pure.

Sizes of memory are powers of 1024 (GiB), as devices are sold; amounts on a wire are powers of 1000 (GB), as links are.
"""

from __future__ import annotations

import math

GIB = 2**30
_BINARY = ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB"), (2.0**50, "PiB"))
_SHORT = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_LONG = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
_THREE_DIGITS = 999.5
"""From here on, three digits round to 1000 of a unit: the next unit is due."""


def number(value: float) -> str:
    """A plain number: 2.041, 0.0003, 3e-06."""
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def loss(value: float) -> str:
    """A loss, four digits, zeros kept so that a column lines up: 2.040, 0.001250."""
    return f"{value:#.4g}" if math.isfinite(value) else "not finite"


def count(value: float) -> str:
    """How many: 912, 14.2k, 0.912M of things."""
    for bound, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound * 0.9995:
            return f"{value / bound:.3g}{letter}"
    return f"{value:.3g}" if value % 1 else f"{value:.0f}"


def quantity(value: float) -> str:
    """A price, a rate, an amount: three digits and more, written out: 0.0123, 4.56, 12,346."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def plural(quantity: int, noun: str, plural_noun: str = "") -> str:
    """A quantity and its noun: "1 sample", "1,200 samples"; `plural_noun` where it is not the noun and an s."""
    return f"{quantity:,} {noun if quantity == 1 else plural_noun or noun + 's'}"


def byte_size(value: float) -> str:
    """Bytes on a wire or on a disk, in powers of a thousand: 912 B, 3.65 MB."""
    text = count(value)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def memory_size(value: float) -> str:
    """Bytes of memory, in powers of 1024: 912 B, 23.4 MiB, 79.6 GiB."""
    if not math.isfinite(value):
        return "unknown"
    unit, name = next(((u, n) for u, n in _BINARY if abs(value) / u < _THREE_DIGITS), _BINARY[-1])
    return f"{value:.0f} B" if unit == 1 else f"{_three_digits(value / unit)} {name}"


MEMORY_SIZE = r"^[0-9]+(\.[0-9]+)? ?(B|KiB|MiB|GiB|TiB)$"
"""How a run file writes a size of memory, as `memory_size` does: "512 MiB"."""


def memory_bytes(text: str) -> int:
    """Bytes of a size that is written as `MEMORY_SIZE` says."""
    digits = text.rstrip("BKMGTi").rstrip()
    return int(float(digits) * {name: unit for unit, name in _BINARY}[text[len(digits) :].lstrip()])


def seconds(value: float) -> str:
    """A time that is compared with others, three digits: 850 ns, 12.3 ms, 4.56 s; from two minutes on `duration`."""
    if not math.isfinite(value):
        return "unknown"
    if value == 0:
        return "0 s"
    if abs(value) >= 120:
        return duration(value)
    unit, name = next(((u, n) for u, n in _SHORT if abs(value) / u < _THREE_DIGITS), _SHORT[-1])
    return f"{_three_digits(value / unit)} {name}"


def duration(value: float) -> str:
    """How long something lasts, from seconds: 182 ms, 42 s, 2 min 05 s, 3 h 12 min, 2 d 03 h."""
    if not math.isfinite(value):
        return "unknown"
    if value < 0:
        return f"-{duration(-value)}"
    if value == 0:
        return "0 s"
    if value < 1:
        return milliseconds(value)
    whole = round(value)
    for size, name, part_size, part in _LONG:
        if whole >= size:
            return f"{whole // size:,} {name} {whole % size // part_size:02d} {part}"
    return f"{value:.1f} s" if value < 10 else f"{whole} s"


def clock(value: float) -> str:
    """Seconds as a clock shows them: 0:42, 12:05, 3:12:05; hours are not cut off at a day."""
    whole = round(max(0.0, value)) if math.isfinite(value) else 0
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def milliseconds(value: float) -> str:
    """Seconds as milliseconds, for columns of one unit: 182 ms, 3.42 ms, 0.05 ms."""
    scaled = value * 1e3
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:,.{digits}f} ms"


def percent(share: float) -> str:
    """A share of one: 4.1 %, 73 %."""
    value = share * 100
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %"


def _three_digits(value: float) -> str:
    """1.20, 12.0, 120; whole numbers as they are."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 99.95 else f"{value:#.3g}"
