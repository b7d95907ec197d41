"""What a plan's predictions are judged by: the errors of this machine's own runs, or those of published tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.planner.explain.residuals import FEWEST, PUBLISHED_MEMORY, PUBLISHED_TIME, Residuals
from shoal.planner.predict.predictor import Predictor
from shoal.recipes.planning.history import remembered


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """The errors that time and memory have had."""

    time: Residuals
    memory: Residuals


def confidence_in(predictor: Predictor, environ: Mapping[str, str]) -> Confidence:
    """This machine's runs where predictions are of it and there are enough; else the published tables.

    Runs of traced models are not predicted, so that nothing is remembered of them.
    """
    past = remembered(environ) if predictor.measured is not None and predictor.simulates else []
    times = [run.measured_s / run.predicted_s for run in past if run.predicted_s > 0 and run.measured_s > 0]
    sizes = [run.measured_bytes / run.predicted_bytes for run in past if run.predicted_bytes and run.measured_bytes]
    return Confidence(time=_own(times, PUBLISHED_TIME), memory=_own(sizes, PUBLISHED_MEMORY))


def _own(ratios: list[float], published: Residuals) -> Residuals:
    if len(ratios) < FEWEST:
        return published
    return Residuals.of(ratios, f"{len(ratios)} runs on this machine")
