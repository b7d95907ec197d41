"""`shoal report`: reads a run directory, and writes `report.html` and `loss.png` into it."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.observe.facts import replace_file
from shoal.observe.loss_picture import loss_picture
from shoal.observe.page import page
from shoal.observe.record import read_record
from shoal.observe.summary import summarize


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
