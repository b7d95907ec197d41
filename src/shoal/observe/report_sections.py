"""Sections of the report: where the time went, and the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from shoal import units
from shoal.observe.charts import Across, Curve, Level, bar, chart
from shoal.observe.events import Attempt, series
from shoal.observe.record import RankTime, Record, collective_costs, parts_of_step, slowest
from shoal.observe.summary import Summary, smoothed_loss
from shoal.observe.tables import Html, section, table, tabs

# The report on where the time went: the parts of a step, its communication, and the ranks side by side.


MAX_SAVES = 12
"""Checkpoints in the table."""
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


def checkpoint_section(record: Record) -> str:
    """What the newest saves took and wrote; "" where none has ended."""
    figures = [
        dict(zip(*series(record.events, f"checkpoint/{name}"), strict=True))
        for name in ("saved_step", "save_s", "written_bytes", "reused_bytes", "state_bytes")
    ]
    saves = [[values.get(at, math.nan) for values in figures] for at in figures[0]]
    if not saves:
        return ""
    stalls = dict(zip(*series(record.events, "time/checkpoint_stall"), strict=True))
    rows = [
        (
            str(int(step)),
            units.milliseconds(stalls[int(step) + 1]) if step + 1 in stalls else "–",
            units.seconds(seconds),
            units.byte_size(written),
            units.byte_size(reused),
            units.percent((written + reused) / state) if state else "",
        )
        for step, seconds, written, reused, state in saves[-MAX_SAVES:]
    ]
    lead = (
        "Training stood still for the stall; a thread wrote meanwhile. Objects that were on the disk already are not "
        "written again."
    )
    if len(saves) > MAX_SAVES:
        lead += f" The newest {MAX_SAVES} of {len(saves)}."
    columns = ("checkpoint of step", "stall", "until it was whole", "written", "already there", "of the state's bytes")
    return section("Checkpoints", table(columns, rows), lead=lead)


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


# The report's charts of measurements: the loss by step, by tokens and by time, then the others step by step.
#
# A restart is a dashed upright line.


_SPANS = ((172_800.0, 86_400.0, "days"), (7_200.0, 3_600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From so many seconds on, a time axis is in units of so many seconds, of this name."""


def steps_across(summary: Summary) -> Across:
    """The axis of steps, with the restarts marked."""
    return Across(marks=[one.first_step - 0.5 for one in summary.attempts[1:]])


def loss_section(record: Record, summary: Summary) -> str:
    """The loss, raw and smoothed, and held out: by step, and by tokens (or samples) and time where those are known."""
    step_axis = steps_across(summary)
    panels = [("by step", _loss(record, summary, step_axis, None))]
    for name in ("tokens", "samples"):
        consumed = dict(zip(*series(record.events, f"{name}/consumed"), strict=True))
        if consumed:
            across = Across(name, marks=_marks(summary.attempts, consumed))
            panels.append((f"by {name}", _loss(record, summary, across, consumed)))
            break
    elapsed_s = training_seconds(record, summary)
    if len(elapsed_s) > 1:
        size_s, name = next((size, name) for bound, size, name in _SPANS if max(elapsed_s.values()) >= bound)
        places = {step: value / size_s for step, value in elapsed_s.items()}
        across = Across(f"{name} of training", units.number, _marks(summary.attempts, places), whole=False)
        panels.append(("by time", _loss(record, summary, across, places)))
    return f"<section>{tabs('loss-axis', panels)}</section>"


def measurement_section(record: Record, summary: Summary) -> str:
    """Throughput, memory, bytes sent, learning rate and gradient norm, step by step, and what else the run measured."""
    across = steps_across(summary)
    charts = [
        _throughput(record, summary, across),
        _memory(record, across),
        *_wire(record, across),
        chart("Learning rate", [Curve("", *series(record.events, "lr"))], across=across, from_zero=True),
        chart("Gradient norm", _smoothed(record, "grad/norm"), across=across, may_be_log=True),
        *_codec(record, across),
        *_device(record, across),
        *_left_out(record, across),
        *_moved(record, across),
    ]
    restarts = "" if not across.marks else "A dashed upright line is a restart."
    return section("Step by step", f'<div class="grid-of-charts">{"".join(charts)}</div>', lead=restarts)


def training_seconds(record: Record, summary: Summary) -> dict[int, float]:
    """Seconds of training behind each step, time away from the run not counted; the last attempt counts for a step."""
    found: dict[int, float] = {}
    before_s, remaining = 0.0, list(summary.attempts)
    first_step_s = summary.step_s or 0.0
    for event in record.events:
        while len(remaining) > 1 and event.time_s >= remaining[1].started_s:
            before_s += remaining[0].ended_s - remaining[0].started_s + first_step_s
            remaining.pop(0)
        found[event.step] = before_s + max(0.0, event.time_s - remaining[0].started_s) + first_step_s
    ordered: dict[int, float] = {}
    latest = 0.0
    for step in sorted(found):  # clocks may go back; an axis does not
        latest = max(latest, found[step])
        ordered[step] = latest
    return ordered


def _loss(record: Record, summary: Summary, across: Across, places: Mapping[int, float] | None) -> str:
    steps, losses = series(record.events, "loss/train")
    curves = [
        _placed("each step", steps, losses, "faint", places),
        _placed("training, smoothed", steps, smoothed_loss(losses), "main", places),
    ]
    held_out = series(record.events, "loss/eval")
    if held_out[0]:
        curves.append(_placed("held out", *held_out, "dots", places))
    level = None if summary.baseline_loss is None else Level(summary.baseline_name, summary.baseline_loss)
    return chart("Loss", curves, across=across, unit=summary.loss_unit, level=level, may_be_log=True, large=True)


def _placed(
    label: str, steps: Sequence[int], values: Sequence[float], look: str, places: Mapping[int, float] | None
) -> Curve:
    """A curve over steps, or over `places` of the steps; steps without a place are left out."""
    if places is None:
        return Curve(label, steps, values, look)
    kept = [(places[step], value) for step, value in zip(steps, values, strict=True) if step in places]
    return Curve(label, [place for place, _ in kept], [value for _, value in kept], look)


def _marks(attempts: Sequence[Attempt], places: Mapping[int, float]) -> list[float]:
    """Where the attempts after the first begin."""
    return [places[one.first_step] for one in attempts[1:] if one.first_step in places]


def _throughput(record: Record, summary: Summary, across: Across) -> str:
    name = summary.throughput_unit.removesuffix("/s") or "samples"
    curves = _smoothed(record, f"throughput/{name}_per_second")
    return chart("Throughput", curves, across=across, unit=f"{name}/s", from_zero=True, form=units.count)


def _memory(record: Record, across: Across) -> str:
    """The peak, and what is live of what the allocator holds."""
    looks = {"peak": "faint", "held": "second", "live": "main"}
    found = {name: series(record.events, f"memory/{name}_bytes") for name in looks}
    most = max((value for _, values in found.values() for value in values), default=0.0)
    size, unit = (units.GIB, "GiB") if most >= units.GIB else (2**20, "MiB")
    curves = [
        Curve(name, steps, [value / size for value in values], looks[name]) for name, (steps, values) in found.items()
    ]
    told = [curve for curve in curves if curve.places] or curves[:1]
    return chart(f"Memory of rank {record.lead_rank}", told, across=across, unit=unit, from_zero=True)


def _wire(record: Record, across: Across) -> list[str]:
    """Nothing where one rank trains alone."""
    curve = Curve("", *series(record.events, "wire/bytes_sent"))
    if not any(curve.values):
        return []
    title = f"Sent by rank {record.lead_rank}"
    return [chart(title, [curve], across=across, unit="bytes a step", from_zero=True, form=units.byte_size)]


def _device(record: Record, across: Across) -> list[str]:
    """MFU and HFU, and the watts and joules of a GPU; nothing where they were not measured."""
    shares = [Curve(name.upper(), *series(record.events, f"throughput/{name}")) for name in ("mfu", "hfu")]
    charts = []
    if shares[0].places:
        title = f"Of the peak of rank {record.lead_rank}'s device"
        charts.append(chart(title, shares, across=across, from_zero=True, form=units.percent))
    for title, name, unit in (("Power of its GPU", "gpu/power_watts", "W"), ("Energy", "gpu/joules_per_token", "J")):
        if (found := series(record.events, name))[0]:
            unit = "J a token" if unit == "J" else unit
            charts.append(chart(title, [Curve("", *found)], across=across, unit=unit, from_zero=True))
    return charts


def _codec(record: Record, across: Across) -> list[str]:
    """How long coding took; nothing without a codec."""
    if not series(record.events, "codec/encode_s")[0]:
        return []
    curves = [
        Curve(label, *_milliseconds(record, name))
        for label, name in (("encoding", "codec/encode_s"), ("decoding", "codec/decode_s"))
    ]
    return [chart("Coding", curves, across=across, unit="ms a step", from_zero=True)]


def _left_out(record: Record, across: Across) -> list[str]:
    """Shares that error feedback keeps back, that masks keep and that are frozen; nothing without these."""
    named = {
        "Kept back by the codec, of what was to be sent": "codec/error",
        "Weights that masks keep": "sparsity/density",
        "Parameters that were frozen": "freeze/share",
        "Samples whose frozen blocks were not computed": "freeze/left_out",
    }
    found = {title: series(record.events, name) for title, name in named.items()}
    return [
        chart(title, [Curve("", *values)], across=across, from_zero=True, form=units.percent)
        for title, values in found.items()
        if values[0]
    ]


def _moved(record: Record, across: Across) -> list[str]:
    """What `memory.offload` moves in a step, and how long the step stood still for it; nothing without it."""
    named = {"to device": "to_device", "to host": "to_host", "from disk": "disk_read", "to disk": "disk_written"}
    found = {label: series(record.events, f"memory/{name}_bytes") for label, name in named.items()}
    looks = iter(("main", "second", "faint", "faint"))
    curves = [Curve(label, *values, next(looks)) for label, values in found.items() if any(values[1])]
    if not curves:
        return []
    waits = Curve("", *_milliseconds(record, "memory/exposed_s"))
    return [
        chart("Moved by memory.offload", curves, across=across, unit="bytes a step", from_zero=True,
              form=units.byte_size),
        chart("Stood still for these moves", [waits], across=across, unit="ms a step", from_zero=True),
    ]  # fmt: skip


def _milliseconds(record: Record, name: str) -> tuple[Sequence[int], list[float]]:
    steps, seconds = series(record.events, name)
    return steps, [1e3 * value for value in seconds]


def _smoothed(record: Record, name: str) -> list[Curve]:
    steps, values = series(record.events, name)
    return [Curve("each step", steps, values, "faint"), Curve("smoothed", steps, smoothed_loss(values))]
