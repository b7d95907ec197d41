"""The pictures of `shoal bench comm` and `shoal bench wire`, PNG, SVG or PDF by the file's ending.

`comm`: bus bandwidth over size, a panel for each operation, a line for each backend. `wire`: how many times as fast as
Gloo shared memory is, and which share of the bound it reaches, a bar for each case and number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#5a6d76", "#0b7a75", "#d9532c", "#6b4fa0", "#c28f0e")
INK, RULE = "#12242d", "#e8edef"
AIM = 0.95
"""Of the bound: what shared memory aims at."""
GROUP_HEIGHT = 0.8
Rows = Sequence[dict[str, Any]]


def write_picture(rows: Rows, path: Path) -> None:
    """Draws the `rows` of `shoal bench comm` to `path`."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    columns, lines = min(3, len(operations)), -(-len(operations) // 3)
    figure, panels = _sheet(lines, columns, size_inches=(4.2 * columns, 3.2 * lines))
    for axes in panels[len(operations) :]:
        axes.set_visible(False)
    for operation, axes in zip(operations, panels, strict=False):
        _draw(axes, operation, [row for row in rows if row["operation"] == operation])
    figure.savefig(path)


def write_wire_picture(rows: Rows, path: Path) -> None:
    """Draws the `rows` of `shoal bench wire` to `path`; a mark on a bar is what was promised of it."""
    cases = list(dict.fromkeys(_case(row) for row in rows))
    worlds = sorted({row["ranks"] for row in rows})
    height = 1.3 + len(cases) * (0.22 + 0.18 * len(worlds))
    figure, (times, shares) = _sheet(1, 2, size_inches=(9.6, height))
    for ranks in worlds:
        own = [row for row in rows if row["ranks"] == ranks]
        places = [_middle(cases.index(_case(row)), worlds.index(ranks), of=len(worlds)) for row in own]
        _bars(times, places, own, "ratio_median", ranks=ranks, number=worlds.index(ranks), of=len(worlds))
        _bars(shares, places, own, "of_the_bound", ranks=ranks, number=worlds.index(ranks), of=len(worlds))
        promised = [(row["promised"], at) for row, at in zip(own, places, strict=True) if row["promised"]]
        times.plot(
            [value for value, _ in promised], [at for _, at in promised], linestyle="none", marker="|", color=INK,
            markersize=9, markeredgewidth=2, label="promised" if ranks == worlds[-1] else None,
        )  # fmt: skip
    times.axvline(1, color=INK, linewidth=0.8)
    shares.axvline(AIM, color=INK, linewidth=0.8, linestyle="--", label=f"aim: {AIM}")
    times.set_yticks(range(len(cases)), cases)
    shares.set_yticks(range(len(cases)), [])
    _dress(times, "times as fast as Gloo", x="median of the turns")
    _dress(shares, "share of the bound by copying and adding", x="bound's time over shared memory's, median")
    for axes in (times, shares):
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.set_xlim(left=0)
    figure.savefig(path)


def size_name(size_bytes: int) -> str:
    """`16 MiB`, where it is that within a hundredth; else in a smaller unit."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        whole = round(size_bytes / unit)
        if whole and abs(size_bytes / unit - whole) < 0.01:
            return f"{whole} {name}"
    return f"{size_bytes} B"


def _case(row: dict[str, Any]) -> str:
    return f"{row['operation']}, {size_name(row['bytes'])}"


def _middle(case: int, number: int, *, of: int) -> float:
    """Where the bar `number` of `of` in the group of a case lies; the group's middle is `case`."""
    return case + GROUP_HEIGHT * ((number + 0.5) / of - 0.5)


def _bars(axes: Any, places: Sequence[float], rows: Rows, key: str, *, ranks: int, number: int, of: int) -> None:
    colour = COLOURS[(number + 1) % len(COLOURS)]
    drawn = axes.barh(
        places, [row[key] for row in rows], height=GROUP_HEIGHT / of, color=colour, label=f"{ranks} ranks"
    )
    axes.bar_label(drawn, fmt="%.2f", padding=4, fontsize=7, color=INK)


def _draw(axes: Any, operation: str, rows: Rows) -> None:
    series = dict.fromkeys((row["backend"], row["ranks"]) for row in rows)
    backends = list(dict.fromkeys(backend for backend, _ in series))
    worlds = sorted({ranks for _, ranks in series})
    for backend, ranks in series:
        own = [row for row in rows if (row["backend"], row["ranks"]) == (backend, ranks)]
        axes.plot(
            [row["bytes"] for row in own], [row["busbw_gb_s"] for row in own], marker=".", linewidth=1.6,
            color=COLOURS[backends.index(backend) % len(COLOURS)], label=f"{backend}, {ranks} ranks",
            linestyle=("-", "--", ":", "-.")[worlds.index(ranks) % 4],
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("bus bandwidth, GB/s", fontsize=8)
    _dress(axes, operation, x="bytes")


def _sheet(lines: int, columns: int, *, size_inches: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure and its panels, line by line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def _dress(axes: Any, title: str, *, x: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel(x, fontsize=8)
    axes.grid(color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)
