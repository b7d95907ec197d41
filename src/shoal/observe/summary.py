"""A run in a few numbers, from its events and facts; and the head of the report, which shows those asked for first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from shoal import units
from shoal.observe import events as curves
from shoal.observe.events import Attempt, Event, attempts, series, training_time_s
from shoal.observe.facts import number_of, text_of
from shoal.observe.goodput import DETECTING, RESTARTING, goodput_of
from shoal.observe.record import Record
from shoal.observe.sink import OPEN_END
from shoal.observe.status import Totals

SMOOTHING_SHARE = 0.008
"""Half-life of the smoothed loss, as a share of the run's steps."""


@dataclass(frozen=True)
class Summary:
    """None stands for what was not measured. Losses are in `loss_unit`, shares from 0 to 1.

    `state` is one of "finished", "running", "stopped", "diverged", "failed" and "killed". `goodput`: see
    `observe.goodput`.
    `detecting_s` and `restarting_s` are what changes of an elastic run's membership cost.
    """

    state: str
    step: int
    total_steps: int | None
    loss_unit: str
    train_loss: float | None
    last_train_loss: float | None
    held_out_loss: float | None
    accuracy: float | None
    baseline_name: str
    baseline_loss: float | None
    throughput: float | None
    throughput_unit: str
    step_s: float | None
    exposed_share: float | None
    goodput: float | None
    time_s: float | None
    attempts: list[Attempt]
    skipped_steps: list[int]
    detecting_s: float
    restarting_s: float

    @property
    def badge(self) -> str:
        """State and position: "finished", "failed at step 7 of 40"."""
        if self.state == "finished":
            return "finished"
        of = "" if self.total_steps is None else f" of {self.total_steps:,}"
        return f"{self.state} at step {self.step:,}{of}"


def summarize(record: Record) -> Summary:
    """The numbers of the page's head."""
    events, facts = record.events, record.facts
    total = record.setting("run", "steps")
    total_steps = total if isinstance(total, int) and 0 < total < OPEN_END else None
    done = attempts(events)
    step = done[-1].last_step if done else 0
    losses = series(events, "loss/train")[1]
    smoothed = curves.finite(smoothed_loss(losses))
    baseline = facts.get("baseline")
    baseline = baseline if isinstance(baseline, dict) else {}
    pace, pace_unit = _throughput(events)
    step_s = curves.median(series(events, "time/step")[1])
    whole = goodput_of(events).waterfall()
    return Summary(
        state=_state(record, step, total_steps),
        step=step,
        total_steps=total_steps,
        loss_unit=text_of(facts.get("loss_unit")),
        train_loss=smoothed[-1] if smoothed else None,
        last_train_loss=_last(losses),
        held_out_loss=_held_out(events, facts, "loss"),
        accuracy=_held_out(events, facts, "accuracy"),
        baseline_name=text_of(baseline.get("name")) or "baseline",
        baseline_loss=number_of(baseline.get("loss")),
        throughput=pace,
        throughput_unit=pace_unit,
        step_s=step_s,
        exposed_share=_exposed_share(events),
        goodput=None if whole is None else whole.goodput,
        time_s=training_time_s(done, first_step_s=step_s or 0.0) if done else None,
        attempts=done,
        skipped_steps=skipped_steps(events),
        detecting_s=sum(event.get(DETECTING) or 0.0 for event in events),
        restarting_s=sum(event.get(RESTARTING) or 0.0 for event in events),
    )


def smoothed_loss(losses: list[float]) -> list[float]:
    """The curve that is drawn over the raw losses."""
    return curves.smooth(losses, half_life=max(1.0, SMOOTHING_SHARE * len(losses)))


def skipped_steps(events: list[Event]) -> list[int]:
    """Steps whose loss or gradient norm was not finite: their update was not made."""
    bad: set[int] = set()
    for name in ("loss/train", "grad/norm"):
        steps, values = series(events, name)
        bad.update(step for step, value in zip(steps, values, strict=True) if not math.isfinite(value))
    return sorted(bad)


def header(record: Record, summary: Summary) -> str:
    """Name, state and date; what went wrong, where the run failed."""
    return (
        f'<header><p class="kicker">Shoal run report</p><h1>{escape(record.name)}</h1>'
        f'<p class="state {summary.state}">{escape(summary.badge)}</p>'
        f'<p class="about">{escape(_about(record, summary))}</p></header>{_failure(record, summary)}'
    )


def key_numbers(record: Record, summary: Summary) -> str:
    """A row of figures; those that were not measured are left out."""
    found = [_train_loss(summary), _held_out_headline(summary), _accuracy(summary), _pace(summary), _time(summary)]
    found += [_exposed(summary), _goodput(summary), _critical_batch(record), _memory(record), _parameters(record)]
    found += [_ranks(record), _device_share(record), _energy(record)]
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for label, value, note in (entry for entry in found if entry is not None)
    )
    return f'<dl class="numbers">{cells}</dl>' if cells else ""


def _state(record: Record, step: int, total_steps: int | None) -> str:
    if record.ending is not None:
        return record.ending.state
    if total_steps is not None and step >= total_steps:
        return "finished"
    return "running" if record.running else "killed"


def _failure(record: Record, summary: Summary) -> str:
    """Why the run did not reach its last step."""
    ending = record.ending
    if summary.state == "killed":
        text = (
            "The run ended without a word: it was killed, or its machine went down. "
            "The same command resumes from the newest checkpoint."
        )
        return f'<div class="failure"><p>{text}</p></div>'
    if ending is None or ending.state == "finished":
        return ""
    who = "The run" if ending.rank is None else f"Rank {ending.rank}"
    opening = f"{who} {ending.state}" + (f" with exit code {ending.exit_code}" if ending.exit_code else "")
    cause = f"<pre>{escape(ending.cause)}</pre>" if ending.cause else ""
    return f'<div class="failure"><p>{escape(opening)}{":" if cause else "."}</p>{cause}</div>'


def _throughput(events: list[Event]) -> tuple[float | None, str]:
    for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
        pace = curves.median(series(events, f"throughput/{name}_per_second")[1])
        if pace is not None:
            return pace, unit
    return None, ""


def _exposed_share(events: list[Event]) -> float | None:
    """Exposed communication of all step time; None where steps have no times."""
    by_step: dict[int, dict[str, float]] = {}
    for name in ("time/step", "time/sync_exposed"):
        for step, value in zip(*series(events, name), strict=True):
            by_step.setdefault(step, {})[name] = value
    totals = Totals()
    for values in by_step.values():
        if math.isfinite(values.get("time/step", 0.0)):
            totals.add(values)
    if totals.step_s <= 0:
        return None
    exposed = totals.exposed_s / totals.step_s
    return exposed if math.isfinite(exposed) else None


def _held_out(events: list[Event], facts: dict[str, Any], name: str) -> float | None:
    evaluation = facts.get("evaluation")
    from_facts = number_of(evaluation.get(name)) if isinstance(evaluation, dict) else None
    return _last(series(events, f"{name}/eval")[1]) if from_facts is None else from_facts


def _last(values: list[float]) -> float | None:
    numbers = curves.finite(values)
    return numbers[-1] if numbers else None


def _about(record: Record, summary: Summary) -> str:
    parts = []
    if summary.attempts:
        ended = datetime.fromtimestamp(summary.attempts[-1].ended_s, UTC)
        parts.append(f"{ended:%d %B %Y, %H:%M} UTC")
    corpus = record.facts.get("corpus")
    if isinstance(corpus, dict) and (size := number_of(corpus.get("bytes"))) is not None:
        parts.append(f"{text_of(corpus.get('name')) or 'corpus'}, {units.byte_size(size)}")
    for key, name in (("device", ""), ("torch", "torch ")):
        if value := text_of(record.facts.get(key)):
            parts.append(name + value)
    return " · ".join(parts)


Entry = tuple[str, str, str] | None


def _train_loss(summary: Summary) -> Entry:
    if summary.train_loss is None or summary.last_train_loss is None:
        return None
    note = f"{summary.loss_unit}, smoothed; last {units.loss(summary.last_train_loss)}".removeprefix(", ")
    return "training loss", units.loss(summary.train_loss), note


def _held_out_headline(summary: Summary) -> Entry:
    if summary.held_out_loss is None:
        return None
    note = summary.loss_unit
    if summary.baseline_loss:
        change = summary.held_out_loss / summary.baseline_loss - 1
        way = "below" if change < 0 else "above"
        note = f"{units.percent(abs(change))} {way} {summary.baseline_name} {units.loss(summary.baseline_loss)}"
    return "held-out loss", units.loss(summary.held_out_loss), note


def _accuracy(summary: Summary) -> Entry:
    return None if summary.accuracy is None else ("accuracy", f"{100 * summary.accuracy:.2f} %", "held out")


def _pace(summary: Summary) -> Entry:
    if summary.throughput is None:
        return None
    return summary.throughput_unit, units.count(summary.throughput), "median step"


def _time(summary: Summary) -> Entry:
    if summary.time_s is None:
        return None
    note = "" if summary.step_s is None else f"{units.seconds(summary.step_s)} a step, median"
    return "time", units.duration(summary.time_s), note


def _exposed(summary: Summary) -> Entry:
    if summary.exposed_share is None:
        return None
    return "exposed communication", units.percent(summary.exposed_share), "of all step time"


def _goodput(summary: Summary) -> Entry:
    if summary.goodput is None:
        return None
    of = "of the time since the first step, in steps that last"
    if summary.detecting_s or summary.restarting_s:
        noticed, restarted = units.duration(summary.detecting_s), units.duration(summary.restarting_s)
        of += f"; changes of the membership: {noticed} until losses were known, {restarted} to the next steps"
    return "goodput", units.percent(summary.goodput), of


def _critical_batch(record: Record) -> Entry:
    """The last gradient noise scale, and what it says of a batch twice as large."""
    noise = _last(curves.finite(series(record.events, "noise/scale")[1]))
    if noise is None:
        return None
    batch, note = record.setting("batch", "global_samples"), "samples, the gradient noise scale"
    if isinstance(batch, int) and batch > 0 and noise > 0:
        share = (1 + noise / (2 * batch)) / (1 + noise / batch)
        note += f"; a batch of {2 * batch:,} would take {units.percent(share)} of the steps"
    return "critical batch", units.count(round(noise)), note


def _memory(record: Record) -> Entry:
    measured = [time.peak_bytes for time in record.rank_times if time.peak_bytes is not None]
    return ("peak memory", units.memory_size(max(measured)), "of the fullest rank") if measured else None


def _parameters(record: Record) -> Entry:
    parameters = number_of(record.facts.get("parameters"))
    return None if parameters is None else ("parameters", units.count(parameters), f"{parameters:,.0f}")


def _device_share(record: Record) -> Entry:
    share = curves.median(series(record.events, "throughput/mfu")[1])
    return None if share is None else ("MFU", units.percent(share), text_of(_device_use(record).get("peak_from")))


def _energy(record: Record) -> Entry:
    joules = curves.finite(series(record.events, "gpu/joules_per_token")[1])
    if not joules:
        return None
    return "energy", f"{sum(joules) / len(joules):.3g} J a token", "of all GPUs, by that of rank 0"


def _device_use(record: Record) -> dict[str, Any]:
    found = record.facts.get("device_use")
    return found if isinstance(found, dict) else {}


def _ranks(record: Record) -> Entry:
    world = number_of(record.facts.get("world")) or len(record.rank_times)
    return ("ranks", units.count(world), "") if world else None
