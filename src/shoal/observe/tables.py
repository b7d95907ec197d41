"""The quieter parts of the report: evaluations, samples, starts, skipped steps, facts and the run file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from types import MappingProxyType
from typing import Any

from shoal import units
from shoal.observe.events import series
from shoal.observe.facts import number_of, text_of
from shoal.observe.figures import MEANINGS
from shoal.observe.record import Record
from shoal.observe.summary import Summary
from shoal.standard_output import escape_controls

# The pieces that every section of the report is made of: sections, tables, tabs. All text is escaped here.
#
# A table has a label for each column, which its cells carry along: where the page is as narrow as a phone, the style
# sheet turns every row of a wide table into a card of labelled values.


NARROW_COLUMNS = 4
"""Tables of at most so many columns fit a phone as they are."""


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


Cell = str | Html


def section(title: str, body: str, *, lead: str = "") -> str:
    """A titled part of the page; `lead` is text, `body` is HTML."""
    opening = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{opening}{body}</section>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, prose: bool = False) -> str:
    """A table whose first column names the rows; a cell that is no `Html` is escaped. `prose`: cells are sentences,
    which wrap.
    """
    labels = [escape(label) for label in columns]
    head = f"<th>{labels[0]}</th>" + "".join(f"<td>{label}</td>" for label in labels[1:])
    body = "".join(_row(row, labels) for row in rows)
    kind = "prose" if prose else "few" if len(columns) <= NARROW_COLUMNS else "many"
    return f'<div class="scroll {kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tabs(name: str, panels: Sequence[tuple[str, str]]) -> str:
    """(label, HTML) of which one is shown at a time, chosen by radio buttons: it takes no script."""
    if len(panels) == 1:
        return panels[0][1]
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" id="{escape(name)}-{index}"{" checked" if index == 0 else ""}>'
        f'<label for="{escape(name)}-{index}">{escape(label)}</label>'
        for index, (label, _) in enumerate(panels)
    )
    return f'<div class="tabs">{buttons}' + "".join(f"<div>{body}</div>" for _, body in panels) + "</div>"


def _row(cells: Sequence[Cell], labels: Sequence[str]) -> str:
    name, *values = (cell if isinstance(cell, Html) else escape(cell) for cell in cells)
    data = "".join(f'<td data-label="{label}">{value}</td>' for label, value in zip(labels[1:], values, strict=True))
    return f'<tr><th data-label="{labels[0]}">{name}</th>{data}</tr>'


# What the facts of a run are called on the page, and how their values are written.


MAX_FACT_CHARACTERS = 500
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "steps": "Steps planned",
        "generation": "Starts before this one",
        "parameters": "Trained parameters",
        "world": "Ranks",
        "layout/replicate": "Layout: replicas",
        "layout/shard": "Layout: sharded over",
        "layout/pipeline": "Layout: pipeline stages",
        "layout/context": "Layout: sequence split over",
        "layout/tensor": "Layout: tensors split over",
        "layout/expert": "Layout: experts split over",
        "device": "Device",
        "membership": "Replicas lost and joined",
        "wire": "Communication",
        "host": "Host of rank 0",
        "torch": "PyTorch",
        "python": "Python",
        "threads": "Threads of a rank",
        "allocator": "Memory allocator",
        "data/vocabulary": "Vocabulary",
        "data/train/files": "Training files",
        "data/held_out/files": "Held-out files",
        "data/train/samples": "Training samples",
        "data/held_out/samples": "Held-out samples",
        "data/train/bytes": "Training text",
        "data/held_out/bytes": "Held-out text",
        "corpus/name": "Corpus",
        "corpus/hash": "Hash of the corpus",
        "corpus/bytes": "Size of the corpus",
        "time/step_predicted": "Predicted step",
        "memory/peak_bytes_predicted": "Predicted peak memory",
        "prediction": "Prediction from",
        "attention": "Attention kernels, calls of a step",
        "device_use/flops_of_step": "Floating-point operations of rank 0 in a step",
        "device_use/peak_flops": "Peak of a device, FLOP/s",
        "device_use/peak_from": "Peak from",
        "device_use/energy": "Energy",
        "evaluation/loss": "Held-out loss",
        "evaluation/accuracy": "Held-out accuracy",
    }
)
_TOLD_ELSEWHERE = frozenset({"data/hash", "data/baseline/bigram_nats_per_byte"})


def name_and_value(key: str, value: Any) -> tuple[str, str]:
    """A fact in words; a key that is not known is written with spaces, "own/tuning_runs" as "Own: tuning runs".

    The value is "" for a fact that needs no row: it stands elsewhere on the page, or is an axis that splits nothing.
    """
    words = ": ".join(key.split("/")).replace("_", " ")
    return _NAMES.get(key, words[:1].upper() + words[1:]), _written(key, value)


def _written(key: str, value: Any) -> str:
    if value is None or key in _TOLD_ELSEWHERE or (key.startswith("layout/") and value == 1):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and abs(value) < 10**18:
        return _form_of(key, value)(value)
    if key == "membership" and isinstance(value, list):
        changes = [text_of(one.get("change")) for one in value if isinstance(one, dict)]
        return escape_controls(". ".join(filter(None, changes)))[:MAX_FACT_CHARACTERS]
    if isinstance(value, list):
        between = "; " if key == "attention" else ", "
        return escape_controls(between.join(map(str, value)))[:MAX_FACT_CHARACTERS]
    return escape_controls(str(value))[:MAX_FACT_CHARACTERS]


def _form_of(key: str, value: float) -> Callable[[float], str]:
    if key.startswith("memory/"):
        return units.memory_size
    if key.startswith("time/"):
        return units.seconds
    if key.endswith("bytes"):
        return units.byte_size
    if key.startswith("device_use/"):
        return units.count
    return units.number if isinstance(value, float) else "{:,}".format


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
    return section("What the figures mean", table(("figure", "meaning"), list(MEANINGS.items()), prose=True))
