"""`shoal report`: reads a run directory, and writes `report.html` and `loss.png` into it. A run writes the page alone.

The page is one file: no script, no network, nothing outside it. It says so itself: its content security policy forbids
everything but its own styles. Every text that came from a file is escaped where it enters the HTML. A run that failed,
was killed or still runs has a page, too.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.observe.charts import loss_picture
from shoal.observe.facts import replace_file
from shoal.observe.prediction import predicted_section
from shoal.observe.record import Record, read_record
from shoal.observe.report_experts import expert_section
from shoal.observe.report_sections import (
    checkpoint_section,
    communication_section,
    loss_section,
    measurement_section,
    rank_section,
    steps_across,
    time_section,
)
from shoal.observe.sink import Ending, Sink, write_ending
from shoal.observe.summary import Summary, header, key_numbers, summarize
from shoal.observe.tables import (
    attempt_section,
    evaluation_section,
    facts_section,
    meanings_section,
    run_file_section,
    sample_section,
    section,
    skipped_section,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_directory: Path, *, picture: bool = True) -> Path:
    """Writes both files, the `picture` only where it is asked for and a loss was measured; returns the page's path.

    Raises `UsageError` where the directory holds no run, `EnvironmentFault` where it cannot be written.
    """
    record = read_record(run_directory)
    summary = summarize(record)
    path = run_directory / "report.html"
    drawn = loss_picture(record, summary) if picture else None
    try:
        replace_file(path, page(record, summary).encode("utf-8", errors="replace"))
        if drawn is not None:
            replace_file(run_directory / "loss.png", drawn)
    except OSError as fault:
        raise EnvironmentFault(
            f"{fault.filename or path} cannot be written ({fault.strerror}); a report goes into the run's directory: "
            "make room on the disk, or make the directory writable"
        ) from fault
    return path


def page(record: Record, summary: Summary) -> str:
    """The whole page."""
    body = "".join(
        [
            header(record, summary),
            "".join(f'<p class="notice">{escape(notice)}</p>' for notice in record.notices),
            key_numbers(record, summary),
            _measured(record, summary),
            predicted_section(record),
            expert_section(record, steps_across(summary)),
            evaluation_section(record, summary),
            sample_section(record),
            attempt_section(summary),
            skipped_section(summary),
            facts_section(record),
            meanings_section(),
            run_file_section(record),
        ]
    )
    return document(record.name, body)


def document(title: str, body: str) -> str:
    """A page of one file around `body`, which is HTML."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · Shoal</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _measured(record: Record, summary: Summary) -> str:
    if not record.events:
        return section("Nothing measured", "<p>No step has been recorded in this run directory yet.</p>")
    return (
        loss_section(record, summary)
        + time_section(record)
        + communication_section(record)
        + rank_section(record)
        + checkpoint_section(record)
        + measurement_section(record, summary)
    )


class ReportSink(Sink):
    """Writes down how the run ended, and its report."""

    def __init__(
        self,
        run_directory: Path,
        *,
        page: bool,
        failures: bool,
        note: Callable[[str], None],
        activity: Callable[[str], None],
    ) -> None:
        """`page`: write the report, not the ending alone. `failures`: of a failed run, too; False where the launcher
        writes both when all ranks have ended. `note` is told the report's path, and `activity` before it is made."""
        self._run_directory, self._page, self._failures = run_directory, page, failures
        self._note, self._activity = note, activity

    def finish(self, ending: Ending) -> None:
        """Raises `EnvironmentFault` where the report of a finished run cannot be written."""
        if ending.state == "failed" and not self._failures:
            return
        write_ending(self._run_directory, ending)
        if self._page:
            self._activity("writing the report")
            self._note(f"report: {write_report(self._run_directory, picture=False)}")
