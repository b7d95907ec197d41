"""The quieter parts of the report: evaluations, samples, lives, skipped steps, facts and the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

from shoal.observe import figures
from shoal.observe.breakdown import section, table
from shoal.observe.events import series
from shoal.observe.record import Record
from shoal.observe.summary import Summary, number_of, text_of

MAX_ROWS = 12
MAX_SAMPLE_CHARACTERS = 20_000
MAX_FACT_CHARACTERS = 500
SHOWN_ELSEWHERE = {"samples", "baseline", "loss_unit", "state"}


def evaluation_section(record: Record, summary: Summary) -> str:
    """The last evaluations, one a row; "" where there was none."""
    losses = dict(zip(*series(record.events, "loss/eval"), strict=True))
    accuracies = dict(zip(*series(record.events, "accuracy/eval"), strict=True))
    steps = sorted(losses.keys() | accuracies.keys())
    if not steps:
        return ""
    columns = [("loss", losses, figures.loss)] if losses else []
    columns += [("accuracy", accuracies, lambda share: f"{100 * share:.2f} %")] if accuracies else []
    head = "<tr><th>step</th>" + "".join(f"<td>{label}</td>" for label, _, _ in columns) + "</tr>"
    cells = (
        (step, "".join(f"<td>{form(of[step]) if step in of else '–'}</td>" for _, of, form in columns))
        for step in steps[-MAX_ROWS:]
    )
    rows = "".join(f"<tr><th>{step:,}</th>{row}</tr>" for step, row in cells)
    lead = f"On data held out of training{f', in {summary.loss_unit}' if summary.loss_unit else ''}."
    if len(steps) > MAX_ROWS:
        lead += f" The last {MAX_ROWS} of {len(steps)}."
    return section("Evaluation", f'<div class="narrow">{table(head, rows)}</div>', lead=lead)


def sample_section(record: Record) -> str:
    """Text drawn from the model, the newest first; "" where there is none."""
    samples = record.facts.get("samples")
    found = [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []
    body = "".join(_sample(sample) for sample in reversed(found[-MAX_ROWS:]))
    return section("Drawn from the model", body) if body else ""


def life_section(summary: Summary) -> str:
    """When the run was stopped and started again; "" where it was not."""
    if len(summary.lives) < 2:
        return ""
    head = (
        "<tr><th>start</th><td>at (UTC)</td><td>generation</td><td>resumed after</td><td>reached</td>"
        "<td>computed again</td><td>time away</td></tr>"
    )
    rows = "".join(
        f"<tr><th>{index}</th><td>{datetime.fromtimestamp(life.started_s, UTC):%d %b %H:%M:%S}</td>"
        f"<td>{life.generation}</td><td>{f'step {life.first_step - 1:,}' if index > 1 else '–'}</td>"
        f"<td>step {life.last_step:,}</td><td>{life.repeated_steps:,}</td>"
        f"<td>{figures.duration(life.away_s) if index > 1 else '–'}</td></tr>"
        for index, life in enumerate(summary.lives, start=1)
    )
    again = sum(life.repeated_steps for life in summary.lives)
    lead = f"The run was started {len(summary.lives)} times; {again:,} of its steps were computed again."
    return section("Starts", table(head, rows), lead=lead)


def skipped_section(summary: Summary) -> str:
    """Which steps were not finite; "" where all were."""
    steps = summary.skipped_steps
    if not steps:
        return ""
    named = ", ".join(f"{step:,}" for step in steps[:40]) + (", …" if len(steps) > 40 else "")
    noun = "step was" if len(steps) == 1 else "steps were"
    body = f"<p>{len(steps):,} {noun} not finite in loss or gradient norm, and changed no weight: {named}.</p>"
    return section("Skipped steps", body)


def facts_section(record: Record) -> str:
    """Everything else that was written down; "" where nothing was."""
    shown = {key: value for key, value in record.facts.items() if key not in SHOWN_ELSEWHERE}
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _flat(shown))
    return section("Facts", f'<div class="scroll"><table class="facts">{rows}</table></div>') if rows else ""


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
    return f"{at}<pre><b>{escape(prompt)}</b>{escape(text.removeprefix(prompt))}</pre>"


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, _fact(value)


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return figures.number(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return f"{value:,}"
    return str(value)[:MAX_FACT_CHARACTERS]
