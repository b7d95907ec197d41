"""The report's "as predicted?": the step and the memory that were predicted at the start, beside what was measured.

The report as one HTML page: no script, no network, nothing outside the file.

The page says so itself: its content security policy forbids everything but its own styles. Every text that came from
a file is escaped where it enters the HTML.

`shoal report`: reads a run directory, and writes `report.html` and `loss.png` into it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shoal.errors import EnvironmentFault
from shoal.observe import figures
from shoal.observe.breakdown import rank_section, section, table, time_section
from shoal.observe.charts import Curve, Level, chart
from shoal.observe.events import Event, series
from shoal.observe.expert_section import expert_section
from shoal.observe.facts import last_life, replace_file
from shoal.observe.loss_picture import loss_picture
from shoal.observe.record import Record, read_record
from shoal.observe.summary import Summary, header, key_numbers, number_of, smoothed_loss, summarize, text_of
from shoal.observe.tables import (
    evaluation_section,
    facts_section,
    life_section,
    run_file_section,
    sample_section,
    skipped_section,
)

STEP, MEMORY, BASIS = "time/step_predicted", "memory/peak_bytes_predicted", "prediction"
WARM_UP = 5
"""Steps before the clock counts: the first ones take memory, and build what later ones find."""


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured; `error` is predicted over measured, less one."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compared(facts: Mapping[str, Any], events: Sequence[Event]) -> list[Compared]:
    """What was predicted and could be measured: the median step behind the warm-up, the most memory of the rank.

    Of the last life alone: each start predicts anew, maybe for another layout.
    """
    lived = last_life(events)
    measured = {STEP: _median_step(lived), MEMORY: _peak(lived)}
    pairs = ((name, number_of(facts.get(name)), value) for name, value in measured.items())
    return [Compared(name, predicted, value) for name, predicted, value in pairs if predicted and value]


def predicted_section(record: Record) -> str:
    """Both figures side by side; why there are none, where the run says so; "" for a run that says nothing."""
    basis = text_of(record.facts.get(BASIS))
    found = compared(record.facts, record.events)
    if not found:
        return section("As predicted?", f"<p>{escape(basis)}</p>") if basis else ""
    forms: dict[str, tuple[str, Callable[[float], str]]] = {
        STEP: ("step, median", figures.milliseconds),
        MEMORY: ("memory of the lead rank, peak", figures.byte_size),
    }
    rows = "".join(
        f"<tr><th>{forms[one.name][0]}</th><td>{forms[one.name][1](one.predicted)}</td>"
        f"<td>{forms[one.name][1](one.measured)}</td><td>{100 * one.error:+.1f} %</td></tr>"
        for one in found
    )
    head = "<tr><th></th><td>predicted</td><td>measured</td><td>error</td></tr>"
    return section("As predicted?", f'<div class="narrow">{table(head, rows)}</div>', lead=basis)


def _median_step(events: Sequence[Event]) -> float | None:
    steps = series(events, "time/step")[1][WARM_UP:]
    return statistics.median(steps) if steps else None


def _peak(events: Sequence[Event]) -> float | None:
    return max(series(events, "memory/peak_bytes")[1], default=None)


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


def write_report(run_directory: Path) -> Path:
    """Writes both files, the picture only where a loss was measured, and returns the page's path.

    Raises `UsageError` where the directory holds no run, `EnvironmentFault` where it cannot be written.
    """
    record = read_record(run_directory)
    summary = summarize(record)
    path = run_directory / "report.html"
    picture = loss_picture(record, summary)
    try:
        replace_file(path, page(record, summary).encode("utf-8", errors="replace"))
        if picture is not None:
            replace_file(run_directory / "loss.png", picture)
    except OSError as fault:
        raise EnvironmentFault(
            f"{fault.filename or path} cannot be written ({fault.strerror}); a report goes into the run's directory: "
            "make room on the disk, or make the directory writable"
        ) from fault
    return path
