"""The head of the report: the run's name and state, and the numbers that somebody asks for first."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

from shoal.observe import figures
from shoal.observe.record import Record
from shoal.observe.summary import Summary, number_of, text_of


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
    found = [_train_loss(summary), _held_out(summary), _accuracy(summary), _pace(summary), _time(summary)]
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


def _held_out(summary: Summary) -> Entry:
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
