"""The one measured step on which a machine's predictions are calibrated: a small GPT's, alone on its core.

Operators are measured one at a time, with warm caches; a step runs all of them over all of its data. How much longer it
takes than their sum is one factor, on everything that was measured.
"""

from __future__ import annotations

from pathlib import Path

from shoal.planner.predict.measured import measured_of
from shoal.planning.answer import cluster_of, predictor_on
from shoal.planning.operators import SWEPT, cores
from shoal.planning.plan_file import written_plan
from shoal.recipes.benchmarks.crowd_sweep import crowd_run
from shoal.topology.calibration import Calibration


def step_factor(calibration: Calibration) -> float | None:
    """Measured over predicted seconds; None where the step, operators or collectives were not measured."""
    alone = next((crowd.step_s for crowd in calibration.crowds if crowd.ranks == 1), None)
    backend = next((name for name in SWEPT if any(fit.backend == name for fit in calibration.collectives)), None)
    if alone is None or backend is None or not calibration.operators:
        return None
    run_file = crowd_run(Path(), Path("tokens.bin"))
    measured = measured_of(calibration, cores=cores(), dtype="float32", backend=backend)
    predictor = predictor_on(run_file, cluster_of(run_file, None), measured=measured)
    return alone / predictor.bill(written_plan(run_file, predictor.cluster)).total
