"""The report's charts of measurements: the loss by step, by tokens and by time, then the others step by step.

A restart is a dashed upright line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal import units
from shoal.observe.attempts import Attempt
from shoal.observe.charts import Across, Curve, Level, chart
from shoal.observe.events import series
from shoal.observe.markup import section, tabs
from shoal.observe.record import Record
from shoal.observe.summary import Summary, smoothed_loss

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
    """Throughput, memory, bytes sent, learning rate and gradient norm, step by step; with a codec, what it costs."""
    across = steps_across(summary)
    charts = [
        _throughput(record, summary, across),
        _memory(record, across),
        _wire(record, across),
        chart("Learning rate", [Curve("", *series(record.events, "lr"))], across=across, from_zero=True),
        chart("Gradient norm", _smoothed(record, "grad/norm"), across=across, may_be_log=True),
        *_codec(record, across),
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
    steps, values = series(record.events, "memory/peak_bytes")
    size, unit = (units.GIB, "GiB") if max(values, default=0.0) >= units.GIB else (2**20, "MiB")
    curve = Curve("", steps, [value / size for value in values])
    return chart(f"Peak memory of rank {record.lead_rank}", [curve], across=across, unit=unit, from_zero=True)


def _wire(record: Record, across: Across) -> str:
    curve = Curve("", *series(record.events, "wire/bytes_sent"))
    title = f"Sent by rank {record.lead_rank}"
    return chart(title, [curve], across=across, unit="bytes a step", from_zero=True, form=units.byte_size)


def _codec(record: Record, across: Across) -> list[str]:
    """What error feedback keeps back, and the seconds of coding; nothing without a codec."""
    kept, encode = series(record.events, "codec/error"), series(record.events, "codec/encode_s")
    charts = []
    if kept[0]:
        title = "Kept back by the codec, of what was to be sent"
        charts.append(chart(title, [Curve("", *kept)], across=across, from_zero=True))
    if encode[0]:
        curves = [
            Curve(label, *_milliseconds(record, name))
            for label, name in (("encoding", "codec/encode_s"), ("decoding", "codec/decode_s"))
        ]
        charts.append(chart("Coding", curves, across=across, unit="ms a step", from_zero=True))
    return charts


def _milliseconds(record: Record, name: str) -> tuple[Sequence[int], list[float]]:
    steps, seconds = series(record.events, name)
    return steps, [1e3 * value for value in seconds]


def _smoothed(record: Record, name: str) -> list[Curve]:
    steps, values = series(record.events, name)
    return [Curve("each step", steps, values, "faint"), Curve("smoothed", steps, smoothed_loss(values))]
