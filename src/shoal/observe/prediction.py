"""The report's "as predicted?": the step and the memory that were predicted at the start, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from shoal import units
from shoal.observe.events import Event, groups, last_attempt, series
from shoal.observe.facts import number_of, text_of
from shoal.observe.record import Record
from shoal.observe.tables import section, table

STEP, MEMORY, BASIS = "time/step_predicted", "memory/peak_bytes_predicted", "prediction"
WARM_UP = 5
"""Steps before the clock counts: the first ones take memory, and build what later ones find."""
_FORMS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    STEP: ("step, median", units.seconds),
    MEMORY: ("memory of the lead rank, peak", units.memory_size),
}


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
    """What was predicted and could be measured: the median step behind the warm-up (s), the most memory (bytes).

    Of the last attempt alone: each start predicts anew, maybe for another layout.
    """
    of_attempt = last_attempt(events)
    measured = {STEP: median_step_s(of_attempt), MEMORY: _peak(of_attempt)}
    pairs = ((name, number_of(facts.get(name)), value) for name, value in measured.items())
    return [Compared(name, predicted, value) for name, predicted, value in pairs if predicted and value]


def predicted_section(record: Record) -> str:
    """Both figures side by side; why there are none, where the run says so; "" for a run that says nothing."""
    basis = text_of(record.facts.get(BASIS))
    found = compared(record.facts, record.events)
    if not found:
        return section("As predicted?", f"<p>{escape(basis)}</p>") if basis else ""
    rows = [
        (name, form(one.predicted), form(one.measured), f"{100 * one.error:+.1f} %")
        for one in found
        for name, form in (_FORMS[one.name],)
    ]
    body = f'<div class="narrow">{table(("", "predicted", "measured", "error"), rows)}</div>'
    return section("As predicted?", body, lead=basis)


def median_step_s(events: Sequence[Event]) -> float | None:
    """Of one attempt, behind its warm-up (s); None where it took no more steps."""
    steps = series(events, "time/step")[1][WARM_UP:]
    return statistics.median(steps) if steps else None


def measured_attempt(events: Sequence[Event]) -> list[Event]:
    """The newest attempt whose median step is known, else []. A start of a finished run takes no steps."""
    return next((one for one in reversed(groups(events)) if median_step_s(one) is not None), [])


def _peak(events: Sequence[Event]) -> float | None:
    return max(series(events, "memory/peak_bytes")[1], default=None)


# `Forecast`: what a run is expected to take, stated before it starts and kept beside what it took.


@dataclass(frozen=True)
class Forecast:
    """`facts` gives the prediction; `remember` keeps it beside the measurement of a finished run."""

    facts: Callable[..., dict[str, Any]]
    remember: Callable[[Path, Mapping[str, str]], None]
