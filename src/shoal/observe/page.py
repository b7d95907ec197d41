"""The report as one HTML page: no script, no network, nothing outside the file.

The page says so itself: its content security policy forbids everything but its own styles. Every text that came from
a file is escaped where it enters the HTML.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from shoal.observe import figures
from shoal.observe.breakdown import rank_section, section, time_section
from shoal.observe.charts import Curve, Level, chart
from shoal.observe.events import series
from shoal.observe.expert_section import expert_section
from shoal.observe.headline import header, key_numbers
from shoal.observe.predicted import predicted_section
from shoal.observe.record import Record
from shoal.observe.summary import Summary, smoothed_loss
from shoal.observe.tables import (
    evaluation_section,
    facts_section,
    life_section,
    run_file_section,
    sample_section,
    skipped_section,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(record: Record, summary: Summary) -> str:
    """The whole page."""
    body = "".join(
        [
            header(record, summary),
            _notices(record),
            key_numbers(record, summary),
            _measured(record, summary) if record.events else _nothing_yet(),
            predicted_section(record),
            expert_section(record),
            evaluation_section(record, summary),
            sample_section(record),
            life_section(summary),
            skipped_section(summary),
            facts_section(record),
            run_file_section(record),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(record.name)} · Shoal</title><style>{_style()}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _measured(record: Record, summary: Summary) -> str:
    curves = _throughput(record, summary) + _wire(record) + _rate(record) + _norm(record)
    return (
        f"<section>{_loss(record, summary)}</section>"
        f"{time_section(record)}{rank_section(record)}"
        f'{section("Step by step", f"""<div class="grid-of-charts">{curves}</div>""")}'
    )


def _nothing_yet() -> str:
    return section("Nothing measured", "<p>No step has been recorded in this run directory yet.</p>")


def _notices(record: Record) -> str:
    return "".join(f'<p class="notice">{escape(notice)}</p>' for notice in record.notices)


def _loss(record: Record, summary: Summary) -> str:
    steps, losses = series(record.events, "loss/train")
    curves = [Curve("each step", steps, losses, "faint"), Curve("training, smoothed", steps, smoothed_loss(losses))]
    eval_steps, eval_losses = series(record.events, "loss/eval")
    if eval_steps:
        curves.append(Curve("held out", eval_steps, eval_losses, "dots"))
    level = None if summary.baseline_loss is None else Level(summary.baseline_name, summary.baseline_loss)
    return chart("Loss", curves, unit=summary.loss_unit, level=level, may_be_log=True, large=True)


def _throughput(record: Record, summary: Summary) -> str:
    name = summary.throughput_unit.removesuffix("/s") or "samples"
    curve = _smoothed(record, f"throughput/{name}_per_second")
    return chart("Throughput", curve, unit=f"{name}/s", from_zero=True, form=figures.count)


def _wire(record: Record) -> str:
    curves = [Curve("", *series(record.events, "wire/bytes_sent"))]
    title = f"Sent by rank {record.lead_rank}"
    return chart(title, curves, unit="bytes a step", from_zero=True, form=figures.byte_size)


def _rate(record: Record) -> str:
    return chart("Learning rate", [Curve("", *series(record.events, "lr"))], from_zero=True)


def _norm(record: Record) -> str:
    return chart("Gradient norm", _smoothed(record, "grad/norm"), may_be_log=True)


def _smoothed(record: Record, name: str) -> list[Curve]:
    steps, values = series(record.events, name)
    return [Curve("each step", steps, values, "faint"), Curve("smoothed", steps, smoothed_loss(values))]


def _style() -> str:
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")
