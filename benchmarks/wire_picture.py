"""The picture of `benchmarks.wire`: how many times as fast as Gloo shared memory is, and its share of the bound.

There is a bar for each case and number of ranks. The file is PNG, SVG or PDF by its suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.bench.pictures import COLOURS, INK, decorate, new_panels

AIM = 0.95
"""The share of the bound that shared memory aims at."""
GROUP_HEIGHT = 0.8
Rows = Sequence[dict[str, Any]]


def write_wire_picture(rows: Rows, path: Path) -> None:
    """Draws the `rows` to `path`; a mark on a bar is the promised ratio."""
    cases = list(dict.fromkeys(_case(row) for row in rows))
    world_sizes = sorted({row["ranks"] for row in rows})
    height = 1.3 + len(cases) * (0.22 + 0.18 * len(world_sizes))
    figure, (times, shares) = new_panels(1, 2, size_inches=(9.6, height))
    for ranks in world_sizes:
        own = [row for row in rows if row["ranks"] == ranks]
        places = [_middle(cases.index(_case(row)), world_sizes.index(ranks), of=len(world_sizes)) for row in own]
        _bars(times, places, own, "ratio_median", ranks=ranks, number=world_sizes.index(ranks), of=len(world_sizes))
        _bars(shares, places, own, "of_the_bound", ranks=ranks, number=world_sizes.index(ranks), of=len(world_sizes))
        promised = [(row["promised"], at) for row, at in zip(own, places, strict=True) if row["promised"]]
        times.plot(
            [value for value, _ in promised], [at for _, at in promised], linestyle="none", marker="|", color=INK,
            markersize=9, markeredgewidth=2, label="promised" if ranks == world_sizes[-1] else None,
        )  # fmt: skip
    times.axvline(1, color=INK, linewidth=0.8)
    shares.axvline(AIM, color=INK, linewidth=0.8, linestyle="--", label=f"aim: {AIM}")
    times.set_yticks(range(len(cases)), cases)
    shares.set_yticks(range(len(cases)), [])
    decorate(times, "times as fast as Gloo", x_label="median of the turns")
    decorate(shares, "share of the bound by copying and adding", x_label="bound's time over shared memory's, median")
    for axes in (times, shares):
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.set_xlim(left=0)
    figure.savefig(path)


def size_name(size_bytes: int) -> str:
    """`16 MiB`, where that is right to 1 %; otherwise in a smaller unit."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        whole = round(size_bytes / unit)
        if whole and abs(size_bytes / unit - whole) < 0.01:
            return f"{whole} {name}"
    return f"{size_bytes} B"


def _case(row: dict[str, Any]) -> str:
    return f"{row['operation']}, {size_name(row['bytes'])}"


def _middle(case: int, number: int, *, of: int) -> float:
    """The position of bar `number` of `of` in the group of a case, whose middle is `case`."""
    return case + GROUP_HEIGHT * ((number + 0.5) / of - 0.5)


def _bars(axes: Any, places: Sequence[float], rows: Rows, key: str, *, ranks: int, number: int, of: int) -> None:
    colour = COLOURS[(number + 1) % len(COLOURS)]
    drawn = axes.barh(
        places, [row[key] for row in rows], height=GROUP_HEIGHT / of, color=colour, label=f"{ranks} ranks"
    )
    axes.bar_label(drawn, fmt="%.2f", padding=4, fontsize=7, color=INK)
