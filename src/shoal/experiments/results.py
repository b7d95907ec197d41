"""What a sweep found: configurations by their objective, with intervals over seeds, as a table and as a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.experiments.sweep import Sweep, TrialOutcome
from shoal.observe.events import read_events, series

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 0.975 quantile, of 1 to 30 degrees of freedom; beyond, that of the normal distribution."""


class Row(msgspec.Struct, frozen=True):
    """One configuration: mean objective over its seeds, half of the 95 % interval of it, and what it took."""

    parameters: dict[str, Any]
    mean: float | None
    half_interval: float | None
    seeds: int
    state: str
    steps: int
    seconds: float


def rows(outcomes: Sequence[TrialOutcome], *, minimize: bool) -> list[Row]:
    """The finished configurations first, the best at the top; then those stopped early, those that failed last."""
    grouped: dict[int, list[TrialOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.trial.configuration, []).append(outcome)
    order = {"finished": 0, "stopped early": 1, "failed": 2, "not finished": 2}
    sign = 1.0 if minimize else -1.0

    def place(row: Row) -> tuple[int, float]:
        return order[row.state], math.inf if row.mean is None else sign * row.mean

    return sorted((_row(group) for group in grouped.values()), key=place)


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean, t * s / sqrt(n); None for fewer than two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    t = _T_975[degrees - 1] if degrees <= len(_T_975) else statistics.NormalDist().inv_cdf(0.975)
    return t * statistics.stdev(values) / math.sqrt(len(values))


def lines(found: Sequence[Row], *, objective: str) -> list[str]:
    """The rows as text in columns."""
    keys = list(found[0].parameters) if found else []
    head = [*keys, objective, "±95 %", "seeds", "steps", "state"]
    body = [
        [*(f"{row.parameters[key]}" for key in keys), "–" if row.mean is None else f"{row.mean:.6g}",
         "–" if row.half_interval is None else f"{row.half_interval:.2g}", str(row.seeds), f"{row.steps:,}", row.state]
        for row in found
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (head, *body)]


def draw(sweep: Sweep, outcomes: Sequence[TrialOutcome], picture: Path) -> None:
    """The objective over the steps of every trial, and over each parameter that is a number."""
    # Half a second of imports that nobody else should wait for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = [outcome.trial.parameters for outcome in outcomes]
    keys = [key for key in chosen[0] if all(_is_number(parameters[key]) for parameters in chosen)]
    figure = Figure(figsize=(6 * (1 + len(keys)), 4.5), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    curves, *scatters = figure.subplots(1, 1 + len(keys), squeeze=False)[0]
    colours = {"finished": "#0b7a75", "stopped early": "#9fb0b6", "failed": "#b3261e", "not finished": "#b3261e"}
    for outcome in outcomes:
        events = read_events(sweep.directory / outcome.trial.name)
        curves.plot(*series(events, sweep.file.objective), color=colours[outcome.state], linewidth=1, marker=".")
    curves.set_xlabel("optimizer step")
    curves.set_ylabel(sweep.file.objective)
    for key, axes in zip(keys, scatters, strict=True):
        for state, colour in colours.items():
            known = [one for one in outcomes if one.state == state and one.value is not None]
            axes.scatter([one.trial.parameters[key] for one in known], [one.value for one in known], color=colour,
                         label=state if known else None)  # fmt: skip
        values = [one.trial.parameters[key] for one in outcomes]
        axes.set_xscale("log" if min(values) > 0 and max(values) / min(values) > 20 else "linear")
        axes.set_xlabel(key)
    for axes in (curves, *scatters):
        axes.spines[["top", "right"]].set_visible(False)
    if scatters:
        scatters[0].legend(frameon=False)
    figure.savefig(picture)


def _row(group: Sequence[TrialOutcome]) -> Row:
    states = {outcome.state for outcome in group}
    state = next(name for name in ("failed", "not finished", "stopped early", "finished") if name in states)
    values = [outcome.value for outcome in group if outcome.value is not None and outcome.state == state]
    return Row(
        parameters=dict(group[0].trial.parameters),
        mean=statistics.fmean(values) if values else None,
        half_interval=interval(values),
        seeds=len(group),
        state=state,
        steps=sum(outcome.step for outcome in group),
        seconds=sum(outcome.seconds for outcome in group),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
