"""One thing done differently, and what becomes of the step and of memory.

Plans, bills and memory as lines of text: what `shoal plan` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.cost.footprint import Footprint
from shoal.planner.explain.residuals import Residuals
from shoal.planner.predict.bill import ITEMS, Bill
from shoal.planner.predict.predictor import Prediction
from shoal.planner.search.scaling import Choice


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was changed; seconds of the step and bytes of the fullest rank afterwards, and whether that fits."""

    what: str
    step_s: float
    memory_bytes: float
    fits: bool


GIB = 2**30
RULE = "-"
NOTICED_GIB, NOTICED_PERCENT = 0.05, 0.5
"""Changes below both are not worth a sentence."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, [RULE * width for width in widths])
    return "\n".join(_aligned(line, widths) for line in lines)


def plans(found: Iterable[Prediction]) -> str:
    """One line a plan: time, rate, MFU, memory."""
    rows = [
        (
            one.plan.describe(),
            seconds(one.step_s),
            f"{one.tokens_per_s:,.0f}",
            f"{100 * one.mfu:.1f}",
            f"{one.memory_bytes / GIB:.1f}",
            "yes" if one.fits else "NO",
        )
        for one in found
    ]
    return table(("plan", "step", "tokens/s", "MFU %", "GiB", "fits"), rows)


def bill(one: Bill) -> str:
    """The seconds of a step, item by item, and their sum."""
    rows = [(name, seconds(value), f"{100 * share:.1f}", ITEMS[name]) for name, value, share in one.rows()]
    rows.append(("step", seconds(one.total), "100.0", "the sum of the above"))
    return table(("time", "a step", "%", "what it is"), rows)


def memory(one: Footprint, limit_bytes: float) -> str:
    """The bytes of the fullest rank, item by item, their sum, and what the device has."""
    rows = [(name, f"{size / GIB:.2f}") for name, size in one.items().items() if size > 0]
    rows += [("peak", f"{one.total / GIB:.2f}"), ("the device has", f"{limit_bytes / GIB:.2f}")]
    return table(("memory of the fullest rank", "GiB"), rows)


def changes(found: Iterable[Change], best: Prediction, *, most: int = 8) -> str:
    """What would help most: the step and the memory of the fullest rank after each change."""
    rows = [
        (
            change.what,
            seconds(change.step_s),
            f"{100 * (change.step_s / best.step_s - 1):+.1f}",
            f"{(change.memory_bytes - best.memory_bytes) / GIB:+.1f}",
            "yes" if change.fits else "NO",
        )
        for change in list(found)[:most]
    ]
    return table(("what would change it", "step", "%", "GiB", "fits"), rows)


def helps(found: Iterable[Change], best: Prediction, *, most: int = 5) -> str:
    """A sentence a change: what it frees or saves, and what for. Changes that only cost are left out."""
    sentences = [sentence for change in found if (sentence := help_sentence(change, best)) is not None]
    return "\n".join(sentences[:most]) or "nothing that was tried would help"


def help_sentence(change: Change, best: Prediction) -> str | None:
    """ "memory.recompute = full frees 5.2 GiB for +18.0 % step time"; None for what helps nothing or does not fit."""
    freed = (best.memory_bytes - change.memory_bytes) / GIB
    saved = 100 * (1 - change.step_s / best.step_s)
    frees, saves = freed >= NOTICED_GIB, saved >= NOTICED_PERCENT
    if not change.fits or not (frees or saves):
        return None
    if frees and saved >= 0:
        return f"{change.what} frees {freed:.1f} GiB and takes {saved:.1f} % off the step"
    if frees:
        return f"{change.what} frees {freed:.1f} GiB for {-saved:+.1f} % step time"
    cost = f" for {-freed:.1f} GiB more" if freed <= -NOTICED_GIB else ""
    return f"{change.what} takes {saved:.1f} % off the step{cost}"


def confidence(best: Prediction, limit_bytes: float, *, time: Residuals, memory: Residuals) -> str:
    """The interval of the step, the odds of running out of memory, and what both are taken from."""
    low, high = time.interval(best.step_s)
    odds = memory.exceeds(best.memory_bytes, limit_bytes)
    return (
        f"90 % of steps like this were measured between {seconds(low)} and {seconds(high)}: {time.source}\n"
        f"It runs out of memory with a probability of {percent(odds)}: {memory.source}"
    )


def choices(found: Iterable[Choice]) -> str:
    """One line a choice of devices and plan: the step, the whole run, memory, device-hours and money."""
    rows = [
        (
            f"{one.devices}: {one.prediction.plan.describe()}",
            seconds(one.prediction.step_s),
            f"{one.cost.wall_s / 3600:,.2f}",
            f"{one.prediction.memory_bytes / GIB:.1f}",
            f"{one.device_hours:,.1f}",
            "-" if one.cost.money is None else f"{one.cost.money:,.4g}",
        )
        for one in found
    ]
    return table(("devices: plan", "step", "run, hours", "GiB", "device-hours", "money"), rows)


def percent(share: float) -> str:
    """Of a probability: 12 %, 0.3 %, less than 0.01 %."""
    return "less than 0.01 %" if share < 1e-4 else f"{100 * share:.2g} %"


def money(cost: Mapping[str, float | None]) -> str:
    """The whole run, line by line."""
    rows = [(name, "not stated" if value is None else f"{value:,.4g}") for name, value in cost.items()]
    return table(("the whole run", ""), rows)


def seconds(value: float) -> str:
    """Three digits in the unit that suits: 12.3 ms, 4.56 s."""
    for limit, unit, name in ((1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (1e4, 1.0, "s")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value:,.0f} s"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [
        cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join([first, *others]).rstrip()
