"""A run in a few numbers, from its events and facts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shoal.observe import series as curves
from shoal.observe.events import Event, series
from shoal.observe.lives import Life, lives, training_time_s
from shoal.observe.record import Record

SMOOTHING_SHARE = 0.008
"""Half-life of the smoothed loss, as a share of the run's steps."""


@dataclass(frozen=True)
class Summary:
    """None stands for what was not measured. Losses are in `loss_unit`."""

    step: int
    total_steps: int | None
    state: str
    loss_unit: str
    train_loss: float | None
    last_train_loss: float | None
    held_out_loss: float | None
    accuracy: float | None
    baseline_name: str
    baseline_loss: float | None
    throughput: float | None
    throughput_unit: str
    step_s: float | None
    time_s: float | None
    lives: list[Life]
    skipped_steps: list[int]

    @property
    def finished(self) -> bool:
        """Did the run reach its last step?"""
        return self.total_steps is not None and self.step >= self.total_steps


def summarize(record: Record) -> Summary:
    """The numbers of the page's head."""
    events, facts = record.events, record.facts
    total = record.setting("run", "steps")
    total_steps = total if isinstance(total, int) and total > 0 else None
    done = lives(events)
    step = done[-1].last_step if done else 0
    losses = series(events, "loss/train")[1]
    smoothed = curves.finite(smoothed_loss(losses))
    baseline = facts.get("baseline")
    baseline = baseline if isinstance(baseline, dict) else {}
    pace, pace_unit = _throughput(events)
    step_s = curves.median(series(events, "time/step")[1])
    return Summary(
        step=step,
        total_steps=total_steps,
        state=_state(step, total_steps, facts.get("state")),
        loss_unit=text_of(facts.get("loss_unit")),
        train_loss=smoothed[-1] if smoothed else None,
        last_train_loss=_last(losses),
        held_out_loss=_held_out(events, facts, "loss"),
        accuracy=_held_out(events, facts, "accuracy"),
        baseline_name=text_of(baseline.get("name")) or "baseline",
        baseline_loss=number_of(baseline.get("loss")),
        throughput=pace,
        throughput_unit=pace_unit,
        step_s=step_s,
        time_s=training_time_s(done, first_step_s=step_s or 0.0) if done else None,
        lives=done,
        skipped_steps=skipped_steps(events),
    )


def smoothed_loss(losses: list[float]) -> list[float]:
    """The curve that is drawn over the raw losses."""
    return curves.smooth(losses, half_life=max(1.0, SMOOTHING_SHARE * len(losses)))


def skipped_steps(events: list[Event]) -> list[int]:
    """Steps whose loss or gradient norm was not finite: their update was not made."""
    bad: set[int] = set()
    for name in ("loss/train", "grad/norm"):
        steps, values = series(events, name)
        bad.update(step for step, value in zip(steps, values, strict=True) if not math.isfinite(value))
    return sorted(bad)


def number_of(value: Any) -> float | None:
    """A finite number, or None: facts come from a file that anybody may have written."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or value != value:
        return None
    return float(value)


def text_of(value: Any) -> str:
    """A text, or "": facts come from a file that anybody may have written."""
    return value if isinstance(value, str) else ""


def _state(step: int, total_steps: int | None, said: Any) -> str:
    if total_steps is not None and step >= total_steps:
        return "finished"
    reached = f"step {step} of {total_steps}" if total_steps is not None else f"step {step}"
    return f"{text_of(said)} at {reached}" if text_of(said) else reached


def _throughput(events: list[Event]) -> tuple[float | None, str]:
    for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
        pace = curves.median(series(events, f"throughput/{name}_per_second")[1])
        if pace is not None:
            return pace, unit
    return None, ""


def _held_out(events: list[Event], facts: dict[str, Any], name: str) -> float | None:
    evaluation = facts.get("evaluation")
    from_facts = number_of(evaluation.get(name)) if isinstance(evaluation, dict) else None
    return _last(series(events, f"{name}/eval")[1]) if from_facts is None else from_facts


def _last(values: list[float]) -> float | None:
    numbers = curves.finite(values)
    return numbers[-1] if numbers else None
