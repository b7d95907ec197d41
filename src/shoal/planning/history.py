"""What was predicted on this machine and what came of it: a line of JSON a run, in the cache folder.

A plan's predictions are judged by the errors of these runs or, while they are few, by those of published tables.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.files import cache_folder, open_file
from shoal.planner.explain.residuals import FEWEST, PUBLISHED_MEMORY, PUBLISHED_TIME, Evidence, Residuals
from shoal.planner.predict.predictor import Predictor

FILE = "predictions.jsonl"
MOST_RUNS = 1000
"""The newest count; older ones were of other versions."""
MOST_BYTES = 4 << 20
PUBLISHED_OF_GPUS = replace(PUBLISHED_MEMORY, source="48 published peaks of GPUs, for want of any of CPU cores")


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its median step, and the most memory of its first rank."""

    time_s: float
    run: str
    layout: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float | None = None
    measured_bytes: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.predicted_s / self.measured_s - 1


def history_path(environ: Mapping[str, str]) -> Path:
    """Where the runs of this machine are kept."""
    return cache_folder(environ) / FILE


def remember(past: Past, environ: Mapping[str, str]) -> None:
    """Adds a run. One write of one line, so that runs that end together do not tear each other's."""
    path = history_path(environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(past) + b"\n")


def remembered(environ: Mapping[str, str]) -> list[Past]:
    """The newest runs, oldest first; lines that are none are passed over."""
    path = history_path(environ)
    if not path.exists():
        return []
    with open_file(path, error=UsageError, repair="move it away, and the next run writes a new one") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
        lines = file.read(MOST_BYTES).splitlines()
    return [past for line in lines if (past := _past(line)) is not None][-MOST_RUNS:]


def track_record(runs: Sequence[Past]) -> str | None:
    """ "on this machine, 14 runs: median error 7 %, worst 19 %"; None without runs."""
    errors = [abs(run.error) for run in runs if run.measured_s > 0]
    if not errors:
        return None
    count = "1 run" if len(errors) == 1 else f"{len(errors)} runs"
    return (
        f"on this machine, {count}: median error of the step {100 * statistics.median(errors):.0f} %, "
        f"worst {100 * max(errors):.0f} %"
    )


def _past(line: bytes) -> Past | None:
    try:
        return msgspec.json.decode(line, type=Past)
    except (ValueError, RecursionError):  # msgspec's and Unicode's own errors are ValueErrors
        return None


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """The errors that time and memory have had; none are known of time where a machine's rates are assumed."""

    time: Residuals | None
    memory: Residuals


def confidence_in(predictor: Predictor, environ: Mapping[str, str], *, evidence: Evidence) -> Confidence:
    """This machine's runs where predictions are of it and there are enough; else the published tables, under the same
    kind of evidence.

    Runs of traced models are not predicted, so that nothing is remembered of them.
    """
    past = remembered(environ) if predictor.measured is not None and predictor.simulates else []
    times = [run.measured_s / run.predicted_s for run in past if run.predicted_s > 0 and run.measured_s > 0]
    sizes = [run.measured_bytes / run.predicted_bytes for run in past if run.predicted_bytes and run.measured_bytes]
    cores = predictor.cluster.machine.scale_up.kind == "memory"
    assumed = predictor.measured is None and cores
    published = PUBLISHED_TIME[evidence]
    if cores:
        published = replace(published, source=f"{published.source}, none of them on CPU cores")
    time = None if assumed and evidence == "data sheet" else _own(times, published)
    return Confidence(time=time, memory=_own(sizes, PUBLISHED_OF_GPUS if cores else PUBLISHED_MEMORY))


def _own(ratios: list[float], published: Residuals) -> Residuals:
    if len(ratios) < FEWEST:
        return published
    return Residuals.of(ratios, f"{len(ratios)} runs on this machine")
