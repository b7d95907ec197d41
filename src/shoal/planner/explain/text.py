"""Plans, bills, memory and changes as lines of text: what `shoal plan` prints.

Every number carries its unit, chosen by its size: a column of a small and a large model reads as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal import units
from shoal.cost.footprint import Footprint
from shoal.planner.explain.residuals import Residuals
from shoal.planner.predict.predictor import Prediction
from shoal.planner.predict.workload import ITEMS, Bill
from shoal.planner.search.scaling import SizedPlan


@dataclass(frozen=True, kw_only=True)
class Change:
    """What was changed; seconds of the step and bytes of the fullest rank afterwards, and whether that fits. `caveat`:
    what it does beside, where it changes the result."""

    what: str
    step_s: float
    memory_bytes: float
    fits: bool
    caveat: str | None = None


RULE = "-"
UNLIKELY = 1e-3
"""Odds of running out of memory below which nobody has to think of it."""
NOTICED_BYTES, NOTICED_PERCENT = 0.05 * units.GIB, 0.5
"""Changes below both are not worth a sentence."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, [RULE * width for width in widths])
    return "\n".join(_aligned(line, widths) for line in lines)


def plans(found: Iterable[Prediction], *, rate: str = "tokens/s") -> str:
    """One line a plan: time, rate (`rate` is its unit), MFU, memory of the fullest rank."""
    rows = [
        (
            one.plan.describe(),
            units.seconds(one.step_s),
            units.quantity(one.tokens_per_s),
            f"{100 * one.mfu:.1f}",
            units.memory_size(one.memory_bytes),
            "yes" if one.fits else "NO",
        )
        for one in found
    ]
    return table(("plan", "step", rate, "MFU %", "memory", "fits"), rows)


def bill(one: Bill) -> str:
    """The seconds of a step, item by item, and their sum."""
    rows = [(name, units.seconds(value), f"{100 * share:.1f}", ITEMS[name]) for name, value, share in one.rows()]
    rows.append(("step", units.seconds(one.total), "100.0", "the sum of the above"))
    return table(("time", "a step", "%", "what it is"), rows)


def memory(one: Footprint, limit_bytes: float) -> str:
    """The bytes of the fullest rank, item by item, their sum, and what the device has."""
    rows = [(name, units.memory_size(size)) for name, size in one.items().items() if size > 0]
    rows += [("peak", units.memory_size(one.total)), ("the device has", units.memory_size(limit_bytes))]
    return table(("memory of the fullest rank", "bytes"), rows)


def changes(found: Iterable[Change], best: Prediction, *, most: int = 8) -> str:
    """What would help most: the step and the memory of the fullest rank after each change."""
    rows = [
        (
            change.what,
            units.seconds(change.step_s),
            signed(100 * (change.step_s / best.step_s - 1)),
            _signed_size(change.memory_bytes - best.memory_bytes),
            "yes" if change.fits else "NO",
        )
        for change in list(found)[:most]
    ]
    return table(("what would change it", "step", "%", "memory", "fits"), rows)


def helps(found: Iterable[Change], best: Prediction, *, most: int = 5) -> str:
    """A sentence a change: what it frees or saves, and what for. Changes that only cost are left out."""
    sentences = [sentence for change in found if (sentence := help_sentence(change, best)) is not None]
    return "\n".join(sentences[:most]) or "nothing that was tried would help"


def help_sentence(change: Change, best: Prediction) -> str | None:
    """ "memory.recompute = full frees 5.2 GiB for +18.0 % step time"; None for what helps nothing or does not fit."""
    freed = best.memory_bytes - change.memory_bytes
    saved = 100 * (1 - change.step_s / best.step_s)
    frees, saves = freed >= NOTICED_BYTES, saved >= NOTICED_PERCENT
    if not change.fits or not (frees or saves):
        return None
    beside = f" ({change.caveat})" if change.caveat else ""
    if frees and signed(saved) == "0.0":
        return f"{change.what} frees {units.memory_size(freed)} in the same time{beside}"
    if frees and saved > 0:
        return f"{change.what} frees {units.memory_size(freed)} and takes {saved:.1f} % off the step{beside}"
    if frees:
        return f"{change.what} frees {units.memory_size(freed)} for {-saved:+.1f} % step time{beside}"
    cost = f" for {units.memory_size(-freed)} more" if freed <= -NOTICED_BYTES else ""
    return f"{change.what} takes {saved:.1f} % off the step{cost}{beside}"


def confidence(best: Prediction, limit_bytes: float, *, time: Residuals | None, memory: Residuals) -> str:
    """The interval of the step (none where `time` is None: its rates are assumed), the odds of running out of memory,
    and what both are taken from."""
    interval = "The step is a guess without an interval: no published step was measured on CPU cores like these"
    if time is not None:
        low, high = (units.seconds(bound) for bound in time.interval(best.step_s))
        interval = f"90 % of steps like this were measured between {low} and {high}: {time.source}"
    odds = memory.exceeds(best.memory_bytes, limit_bytes)
    if odds < UNLIKELY:  # nothing to decide on, so where it comes from is of no interest
        sizes = f"{units.memory_size(best.memory_bytes)} of the {units.memory_size(limit_bytes)} of a device"
        return f"{interval}\nMemory will do: {sizes}"
    return f"{interval}\nIt runs out of memory with a probability of {percent(odds)}: {memory.source}"


def choices(found: Iterable[SizedPlan]) -> str:
    """One line a choice of devices and plan: the step, the whole run, memory, device-hours and money."""
    rows = [
        (
            f"{one.devices}: {one.prediction.plan.describe()}",
            units.seconds(one.prediction.step_s),
            units.duration(one.cost.wall_s),
            units.memory_size(one.prediction.memory_bytes),
            units.quantity(one.device_hours),
            "-" if one.cost.money is None else units.quantity(one.cost.money),
        )
        for one in found
    ]
    return table(("devices: plan", "step", "whole run", "memory", "device-hours", "money"), rows)


def signed(percents: float) -> str:
    """Of a change: +1.3, -0.4, and 0.0 of what rounds to nothing."""
    text = f"{percents:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def percent(share: float) -> str:
    """Of a probability: 12 %, 0.3 %, less than 0.01 %."""
    return "less than 0.01 %" if share < 1e-4 else f"{100 * share:.2g} %"


def money(cost: Mapping[str, float | None]) -> str:
    """The whole run, line by line."""
    rows = [(name, "not stated" if value is None else units.quantity(value)) for name, value in cost.items()]
    return table(("the whole run", ""), rows)


def _signed_size(size_bytes: float) -> str:
    return units.memory_size(size_bytes) if size_bytes <= 0 else f"+{units.memory_size(size_bytes)}"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [
        cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join([first, *others]).rstrip()
