"""The quieter parts of the report: evaluations, samples, starts, skipped steps, facts and the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from shoal import units
from shoal.escape import escape_controls
from shoal.observe.events import series
from shoal.observe.fact_names import name_and_value
from shoal.observe.facts import number_of, text_of
from shoal.observe.figures import MEANINGS
from shoal.observe.markup import section, table
from shoal.observe.record import Record
from shoal.observe.summary import Summary

MAX_ROWS = 12
MAX_SAMPLE_CHARACTERS = 20_000
SHOWN_ELSEWHERE = {"name", "samples", "baseline", "loss_unit", "state", "failure", "provenance"}


def evaluation_section(record: Record, summary: Summary) -> str:
    """The last evaluations, one a row; "" where there was none."""
    losses = dict(zip(*series(record.events, "loss/eval"), strict=True))
    accuracies = dict(zip(*series(record.events, "accuracy/eval"), strict=True))
    steps = sorted(losses.keys() | accuracies.keys())
    if not steps:
        return ""
    columns = [("loss", losses, units.loss)] if losses else []
    columns += [("accuracy", accuracies, lambda share: f"{100 * share:.2f} %")] if accuracies else []
    rows = [
        (f"{step:,}", *(form(of[step]) if step in of else "–" for _, of, form in columns)) for step in steps[-MAX_ROWS:]
    ]
    body = table(("step", *(label for label, _, _ in columns)), rows)
    lead = f"On data held out of training{f', in {summary.loss_unit}' if summary.loss_unit else ''}."
    if len(steps) > MAX_ROWS:
        lead += f" The last {MAX_ROWS} of {len(steps)}."
    return section("Evaluation", f'<div class="narrow">{body}</div>', lead=lead)


def sample_section(record: Record) -> str:
    """Text drawn from the model, the newest first; "" where there is none."""
    samples = record.facts.get("samples")
    found = [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []
    body = "".join(_sample(sample) for sample in reversed(found[-MAX_ROWS:]))
    return section("Drawn from the model", body) if body else ""


def attempt_section(summary: Summary) -> str:
    """When the run was stopped and started again; "" where it was not."""
    if len(summary.attempts) < 2:
        return ""
    columns = ("start", "at (UTC)", "generation", "resumed after", "reached", "computed again", "time away")
    rows = [
        (
            str(index),
            f"{datetime.fromtimestamp(one.started_s, UTC):%d %b %H:%M:%S}",
            str(one.generation),
            f"step {one.first_step - 1:,}" if index > 1 else "–",
            f"step {one.last_step:,}",
            units.plural(one.repeated_steps, "step"),
            units.duration(one.away_s) if index > 1 else "–",
        )
        for index, one in enumerate(summary.attempts, start=1)
    ]
    again = sum(one.repeated_steps for one in summary.attempts)
    lead = f"The run was started {len(summary.attempts)} times; {again:,} of its steps were computed again."
    return section("Starts", table(columns, rows), lead=lead)


def skipped_section(summary: Summary) -> str:
    """Which steps were not finite; "" where all were."""
    steps = summary.skipped_steps
    if not steps:
        return ""
    named = ", ".join(f"{step:,}" for step in steps[:40]) + (", …" if len(steps) > 40 else "")
    count = units.plural(len(steps), "step")
    body = f"<p>{count} had a loss or a gradient norm that was not finite, and changed no weight: {named}.</p>"
    return section("Skipped steps", body)


def facts_section(record: Record) -> str:
    """Everything else that was written down; "" where nothing was."""
    shown = {key: value for key, value in record.facts.items() if key not in SHOWN_ELSEWHERE}
    named = (name_and_value(key, value) for key, value in _flat(shown))
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in named if text)
    return section("Facts", f'<table class="facts">{rows}</table>') if rows else ""


def run_file_section(record: Record) -> str:
    """The resolved run file, folded away; "" where it is missing."""
    if not record.run_file:
        return ""
    folded = f"<details><summary>run.toml, resolved</summary><pre>{escape(record.run_file)}</pre></details>"
    return f"<section>{folded}</section>"


def _sample(sample: Mapping[str, Any]) -> str:
    prompt, text = text_of(sample.get("prompt")), text_of(sample.get("text"))[:MAX_SAMPLE_CHARACTERS]
    step = number_of(sample.get("step"))
    at = "" if step is None else f'<p class="lead">After step {step:,.0f}. The prompt is in bold.</p>'
    prompt, text = escape_controls(prompt), escape_controls(text.removeprefix(prompt))
    return f"{at}<pre><b>{escape(prompt)}</b>{escape(text)}</pre>"


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Facts without nesting: a key inside another is written after it and a slash."""
    for key, value in facts.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}/")
        else:
            yield name, value


def meanings_section() -> str:
    """What the figures of the live line mean."""
    return section("What the figures mean", table(("figure", "meaning"), list(MEANINGS.items())))
