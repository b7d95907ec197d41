"""The report's "as predicted?": the step and the memory that were predicted at the start, beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shoal.observe import figures
from shoal.observe.breakdown import section, table
from shoal.observe.events import Event, series
from shoal.observe.lives import last_life
from shoal.observe.record import Record
from shoal.observe.summary import number_of, text_of

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
