"""The report on where the time went: the parts of a step, its communication, and the ranks side by side."""

from __future__ import annotations

from html import escape

from shoal import units
from shoal.observe.charts import bar
from shoal.observe.markup import Html, section, table
from shoal.observe.record import Record
from shoal.observe.timing import RankTime, collective_costs, parts_of_step, slowest

MAX_RANKS = 24
"""More ranks than these are shown by their slowest."""


def time_section(record: Record) -> str:
    """A stacked bar of all the time of the lead rank's steps, and a table of its parts."""
    parts = parts_of_step(record.events)
    if not parts:
        return section("Where the time went", '<p class="empty">No step has its time measured.</p>')
    fills = [(part.key, f"{part.label}: {units.percent(part.share)}", part.share) for part in parts]
    rows = [
        (
            Html(f'<i class="swatch {part.key}"></i>{escape(part.label)}'),
            units.percent(part.share),
            units.milliseconds(part.median_s),
            units.milliseconds(part.mean_s),
        )
        for part in parts
    ]
    body = bar(fills) + table(("part of a step", "of all time", "median", "mean"), rows)
    lead = f"Rank {record.lead_rank}, all steps. Exposed sync is waiting for other ranks that no computation hid."
    return section("Where the time went", body, lead=lead)


def communication_section(record: Record) -> str:
    """Bytes and seconds of each kind of collective in a mean step of the lead rank; "" where nothing was sent."""
    costs = collective_costs(record.events)
    if not any(cost.sent_bytes > 0 or cost.exposed_s > 0 for cost in costs):
        return ""
    rows = [
        (
            cost.name.replace("_", "-"),
            units.byte_size(cost.sent_bytes),
            units.milliseconds(cost.exposed_s),
            units.milliseconds(cost.hidden_s),
        )
        for cost in costs
    ]
    lead = (
        f"Rank {record.lead_rank}, mean of a step. Exposed: the rank stood still for it. Hidden: it computed meanwhile."
    )
    return section("Communication", table(("collective", "sent", "exposed", "hidden"), rows), lead=lead)


def rank_section(record: Record) -> str:
    """Every rank's median step on one scale, its peak memory, and the slowest by name; "" for a single rank."""
    times = record.rank_times
    if len(times) < 2:
        return ""
    shown = sorted(sorted(times, key=lambda time: -time.work_s)[:MAX_RANKS], key=lambda time: time.rank)
    longest_s = max(time.step_s for time in shown)
    columns = ["rank", "", "step", "forward and backward", "exposed sync", "data"]
    measured_memory = any(time.peak_bytes is not None for time in shown)
    rows = [_rank_row(time, longest_s, with_memory=measured_memory) for time in shown]
    omitted = f" The {len(shown)} with the most work of {len(times)} are shown." if len(shown) < len(times) else ""
    body = table([*columns, "peak memory"] if measured_memory else columns, rows)
    return section("Rank by rank", body, lead=_slowest_sentence(times) + omitted)


def _rank_row(time: RankTime, longest_s: float, *, with_memory: bool) -> list[str]:
    fills = [
        ("data", "waiting for data", time.data_s),
        ("forward_backward", "forward and backward", time.forward_backward_s),
        ("sync_exposed", "exposed sync", time.sync_exposed_s),
        ("optimizer", "optimizer", time.optimizer_s),
    ]
    spans = [(key, f"{label}: {units.milliseconds(seconds)}", seconds) for key, label, seconds in fills]
    cells = (time.step_s, time.forward_backward_s, time.sync_exposed_s, time.data_s)
    row = [str(time.rank), Html(bar(spans, whole=longest_s)), *(units.milliseconds(seconds) for seconds in cells)]
    if with_memory:
        row.append("–" if time.peak_bytes is None else units.memory_size(time.peak_bytes))
    return row


def _slowest_sentence(times: list[RankTime]) -> str:
    found = slowest(times)
    if found is None:
        return "The ranks are even: none has over 5 % more work of its own than the median. Medians of all steps."
    time, excess = found
    return (
        f"Rank {time.rank} is the slowest: its own work takes {units.milliseconds(time.work_s)} of a step, "
        f"{units.percent(excess)} more than the median rank's, and the others wait for it. Medians of all steps."
    )
