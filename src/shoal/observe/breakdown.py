"""The report's answer to "where did the time go": the parts of a step, and the ranks beside each other."""

from __future__ import annotations

from html import escape

from shoal.observe import figures
from shoal.observe.charts import bar
from shoal.observe.record import Record
from shoal.observe.timing import RankTime, parts_of_step, slowest

MAX_RANKS = 24
"""More ranks than these are shown by their slowest."""


def time_section(record: Record) -> str:
    """A stacked bar of all the time of the lead rank's steps, and a table of its parts."""
    parts = parts_of_step(record.events)
    if not parts:
        return section("Where the time went", '<p class="empty">No step has its time measured.</p>')
    fills = [(part.key, f"{part.label}: {figures.percent(part.share)}", part.share) for part in parts]
    rows = "".join(
        f'<tr><th><i class="swatch {part.key}"></i>{escape(part.label)}</th><td>{figures.percent(part.share)}</td>'
        f"<td>{figures.milliseconds(part.median_s)}</td><td>{figures.milliseconds(part.mean_s)}</td></tr>"
        for part in parts
    )
    head = "<tr><th>part of a step</th><td>of all time</td><td>median</td><td>mean</td></tr>"
    return section("Where the time went", bar(fills) + table(head, rows), lead=_time_sentence(record.lead_rank))


def rank_section(record: Record) -> str:
    """Every rank's median step on one scale, and the slowest by name; "" for a single rank."""
    times = record.rank_times
    if len(times) < 2:
        return ""
    shown = sorted(sorted(times, key=lambda time: -time.work_s)[:MAX_RANKS], key=lambda time: time.rank)
    longest_s = max(time.step_s for time in shown)
    rows = "".join(_rank_row(time, longest_s) for time in shown)
    head = (
        '<tr><th>rank</th><th class="wide"></th><td>step</td><td>forward and backward</td>'
        "<td>exposed sync</td><td>data</td></tr>"
    )
    omitted = f" The {len(shown)} with the most work of {len(times)} are shown." if len(shown) < len(times) else ""
    return section("Rank by rank", table(head, rows), lead=_slowest_sentence(times) + omitted)


def section(title: str, body: str, *, lead: str = "") -> str:
    """A titled part of the page; `lead` is escaped, `body` is HTML."""
    opening = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{opening}{body}</section>"


def table(head: str, rows: str) -> str:
    """A table that scrolls sideways where the page is narrow."""
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _time_sentence(rank: int) -> str:
    return f"Rank {rank}, all steps. Exposed sync is waiting for other ranks that no computation hid."


def _rank_row(time: RankTime, longest_s: float) -> str:
    fills = [
        ("data", "waiting for data", time.data_s),
        ("forward_backward", "forward and backward", time.forward_backward_s),
        ("sync_exposed", "exposed sync", time.sync_exposed_s),
        ("optimizer", "optimizer", time.optimizer_s),
    ]
    spans = [(key, f"{label}: {figures.milliseconds(seconds)}", seconds) for key, label, seconds in fills]
    cells = (time.step_s, time.forward_backward_s, time.sync_exposed_s, time.data_s)
    return (
        f'<tr><th>{time.rank}</th><td class="wide">{bar(spans, whole=longest_s)}</td>'
        + "".join(f"<td>{figures.milliseconds(seconds)}</td>" for seconds in cells)
        + "</tr>"
    )


def _slowest_sentence(times: list[RankTime]) -> str:
    found = slowest(times)
    if found is None:
        return "The ranks are even: none has over 5 % more work of its own than the median. Medians of all steps."
    time, excess = found
    return (
        f"Rank {time.rank} is the slowest: its own work takes {figures.milliseconds(time.work_s)} of a step, "
        f"{figures.percent(excess)} more than the median rank's, and the others wait for it. Medians of all steps."
    )
