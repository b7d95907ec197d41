"""A machine of two cores, as `shoal bench products` would have measured it if it were a formula."""

from __future__ import annotations

import itertools

from shoal.planner.predict.measured import OPERATIONS, OPERATORS
from shoal.topology.calibration import Calibration, CollectiveFit, OperatorTime

CORES = 2
RATE, LAUNCH_S = 20e9, 5e-6


def _time(operator: str, m: int, n: int, k: int, ranks: int = 1) -> OperatorTime:
    crowd = max(1.0, ranks / CORES)
    seconds = crowd * (LAUNCH_S + 2 * m * n * k / RATE)
    return OperatorTime(
        operator=operator, dtype="float32", m=m, n=n, k=k, ranks=ranks, forward_s=seconds, backward_s=2 * seconds
    )


def calibration(*, ranks: tuple[int, ...] = (1, 2)) -> Calibration:
    """Every operator a launch and 2 m n k at one rate, the backward twice that; collectives of 2 and 4 ranks."""
    operators = [
        _time(name, m, n, k, count)
        for count in ranks
        for name in OPERATORS
        for m, n, k in itertools.product((64, 4096), (32, 512), (32, 512))
    ]
    steps = [
        OperatorTime(operator="step", dtype="float32", m=m, n=n, k=1, ranks=1, forward_s=0.1 * n, backward_s=0)
        for m, n in ((1, 1), (5, 1), (1, 5))
    ]
    fits = [
        CollectiveFit(backend="shm", operation=name, ranks=count, alpha_s=1e-4, beta_s=2e-10)
        for name in OPERATIONS
        for count in (2, 4)
    ]
    return Calibration(
        machine="test", torch="2.13", collectives=tuple(fits), operators=(*operators, *steps), memory_bytes_s=1e10
    )
