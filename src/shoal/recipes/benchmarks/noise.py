"""`shoal bench noise`: steps to a loss at several batch sizes, predicted from the noise scale measured at one of them.

A small GPT is trained to a fixed held-out loss with each batch size, from several seeds. The noise scale of the runs of
one batch size predicts the steps of all others (cost.noise_scale.steps_at), and sets their learning rates by the rule
of the paper, with the power 1/2 that suits Adam. The peers are two rules of thumb that need no measurement: a batch
twice as large halves the steps, or changes nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.cost.noise_scale import rate_at, steps_at
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks.noise_run import Trained, run_file_of, train_to
from shoal.recipes.benchmarks.paired import check

LOSS, BOUND, POWER = 2.25, 0.15, 0.5
"""Nats per byte that all runs go to; the promised error of a prediction; of the rule for learning rates."""


def measure(
    place: Place, environ: Mapping[str, str], *, batches: Sequence[int], measured_at: int, seeds: int, lr: float
) -> dict[str, Any] | None:
    """Rows and checks; None on all ranks but the first. `lr` is that of the batch size that is measured at."""
    store = open_store(place, environ, timeout_s=600.0)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:

        def trained(batch: int, rate: float) -> list[Trained]:
            runs = (run_file_of(Path(folder), batch=batch, seed=seed) for seed in range(seeds))
            return [train_to(LOSS, run, place, store, lr=rate) for run in runs]

        found = {measured_at: trained(measured_at, lr)}
        scale = mean_scale(found[measured_at])
        best = lr * (1 + scale / measured_at) ** POWER
        rates = {size: rate_at(size, best_rate=best, noise_scale=scale, power=POWER) for size in batches}
        for size in batches:
            if size != measured_at:
                found[size] = trained(size, rates[size])
    return report(found, rates, measured_at) if place.rank == 0 else None


def mean_scale(runs: Sequence[Trained]) -> float:
    """The noise scale in the mean over all steps of all runs, samples."""
    return statistics.mean(scale for run in runs for scale in run.scales)


def report(found: Mapping[int, Sequence[Trained]], rates: Mapping[int, float], measured_at: int) -> dict[str, Any]:
    """Each batch size's steps beside what is predicted from the runs of `measured_at`."""
    source = found[measured_at]
    here = statistics.mean(run.steps for run in source)
    rows, checks = [], []
    for size in sorted(found):
        measured = statistics.mean(run.steps for run in found[size])
        predicted = statistics.mean(steps_at(size, scales=run.scales, measured_batch=measured_at) for run in source)
        rows.append(
            {
                "batch_samples": size,
                "lr": round(rates[size], 6),
                "steps": round(measured, 1),
                "steps_of_seeds": [round(run.steps, 1) for run in found[size]],
                "predicted_steps": round(predicted, 1),
                "error": round(predicted / measured - 1, 4),
                "steps_by_halving": round(here * measured_at / size, 1),
                "steps_unchanged": round(here, 1),
                "samples": round(measured * size),
                "noise_scale": round(mean_scale(found[size]), 2),
            }
        )
        if size != measured_at:
            error = abs(predicted / measured - 1)
            checks.append(
                check(f"steps to {LOSS} nats at {size} samples, from {measured_at}", error, BOUND, at_most=True)
            )
    return {"rows": rows, "checks": checks}
