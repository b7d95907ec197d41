"""A run in a few numbers, from its events and facts. Pure.

The head of the report: the run's name and state, and the numbers that somebody asks for first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from shoal.observe import figures
from shoal.observe import series as curves
from shoal.observe.events import Event, series
from shoal.observe.facts import Life, lives, training_time_s
from shoal.observe.record import Record

SMOOTHING_SHARE = 0.008
"""Half-life of the smoothed loss, as a share of the run's steps."""


@dataclass(frozen=True)
class Summary:
    """None stands for what was not measured. Losses are in `loss_unit`."""

    step: int
    total_steps: int | None
    state: str
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
    time_s: float | None
    lives: list[Life]
    skipped_steps: list[int]

    @property
    def finished(self) -> bool:
        """Did the run reach its last step?"""
        return self.total_steps is not None and self.step >= self.total_steps


def summarize(record: Record) -> Summary:
    """The numbers of the page's head."""
    events, facts = record.events, record.facts
    total = record.setting("run", "steps")
    total_steps = total if isinstance(total, int) and total > 0 else None
    done = lives(events)
    step = done[-1].last_step if done else 0
    losses = series(events, "loss/train")[1]
    smoothed = curves.finite(smoothed_loss(losses))
    baseline = facts.get("baseline")
    baseline = baseline if isinstance(baseline, dict) else {}
    pace, pace_unit = _throughput(events)
    step_s = curves.median(series(events, "time/step")[1])
    return Summary(
        step=step,
        total_steps=total_steps,
        state=_state(step, total_steps, facts.get("state")),
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
        time_s=training_time_s(done, first_step_s=step_s or 0.0) if done else None,
        lives=done,
        skipped_steps=skipped_steps(events),
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


def number_of(value: Any) -> float | None:
    """A finite number, or None: facts come from a file that anybody may have written."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or value != value:
        return None
    return float(value)


def text_of(value: Any) -> str:
    """A text, or "": facts come from a file that anybody may have written."""
    return value if isinstance(value, str) else ""


def _state(step: int, total_steps: int | None, said: Any) -> str:
    if total_steps is not None and step >= total_steps:
        return "finished"
    reached = f"step {step} of {total_steps}" if total_steps is not None else f"step {step}"
    return f"{text_of(said)} at {reached}" if text_of(said) else reached


def _throughput(events: list[Event]) -> tuple[float | None, str]:
    for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
        pace = curves.median(series(events, f"throughput/{name}_per_second")[1])
        if pace is not None:
            return pace, unit
    return None, ""


def _held_out(events: list[Event], facts: dict[str, Any], name: str) -> float | None:
    evaluation = facts.get("evaluation")
    from_facts = number_of(evaluation.get(name)) if isinstance(evaluation, dict) else None
    return _last(series(events, f"{name}/eval")[1]) if from_facts is None else from_facts


def _last(values: list[float]) -> float | None:
    numbers = curves.finite(values)
    return numbers[-1] if numbers else None


def header(record: Record, summary: Summary) -> str:
    """Name, state, date."""
    look = "good" if summary.finished else "open"
    return (
        f'<header><p class="kicker">Shoal run report</p><h1>{escape(record.name)}</h1>'
        f'<p class="state {look}">{escape(summary.state)}</p>'
        f'<p class="about">{escape(_about(record, summary))}</p></header>'
    )


def key_numbers(record: Record, summary: Summary) -> str:
    """A row of figures; those that were not measured are left out."""
    found = [_train_loss(summary), _held_out_headline(summary), _accuracy(summary), _pace(summary), _time(summary)]
    found += [_parameters(record), _ranks(record)]
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for label, value, note in (entry for entry in found if entry is not None)
    )
    return f'<dl class="numbers">{cells}</dl>' if cells else ""


def _about(record: Record, summary: Summary) -> str:
    parts = []
    if summary.lives:
        ended = datetime.fromtimestamp(summary.lives[-1].ended_s, UTC)
        parts.append(f"{ended:%d %B %Y, %H:%M} UTC")
    corpus = record.facts.get("corpus")
    if isinstance(corpus, dict) and (size := number_of(corpus.get("bytes"))) is not None:
        parts.append(f"{text_of(corpus.get('name')) or 'corpus'}, {figures.byte_size(size)}")
    for key, name in (("device", ""), ("torch", "torch ")):
        if value := text_of(record.facts.get(key)):
            parts.append(name + value)
    return " · ".join(parts)


Entry = tuple[str, str, str] | None


def _train_loss(summary: Summary) -> Entry:
    if summary.train_loss is None or summary.last_train_loss is None:
        return None
    note = f"{summary.loss_unit}, smoothed; last step {figures.loss(summary.last_train_loss)}".removeprefix(", ")
    return "training loss", figures.loss(summary.train_loss), note


def _held_out_headline(summary: Summary) -> Entry:
    if summary.held_out_loss is None:
        return None
    note = summary.loss_unit
    if summary.baseline_loss:
        change = summary.held_out_loss / summary.baseline_loss - 1
        way = "below" if change < 0 else "above"
        note = f"{figures.percent(abs(change))} {way} {summary.baseline_name} {figures.loss(summary.baseline_loss)}"
    return "held-out loss", figures.loss(summary.held_out_loss), note


def _accuracy(summary: Summary) -> Entry:
    return None if summary.accuracy is None else ("accuracy", f"{100 * summary.accuracy:.2f} %", "held out")


def _pace(summary: Summary) -> Entry:
    if summary.throughput is None:
        return None
    return summary.throughput_unit, figures.count(summary.throughput), "median step"


def _time(summary: Summary) -> Entry:
    if summary.time_s is None:
        return None
    note = "" if summary.step_s is None else f"{figures.milliseconds(summary.step_s)} a step, median"
    return "time", figures.duration(summary.time_s), note


def _parameters(record: Record) -> Entry:
    parameters = number_of(record.facts.get("parameters"))
    return None if parameters is None else ("parameters", figures.count(parameters), f"{parameters:,.0f}")


def _ranks(record: Record) -> Entry:
    world = number_of(record.facts.get("world")) or len(record.rank_times)
    return ("ranks", figures.count(world), "") if world else None
