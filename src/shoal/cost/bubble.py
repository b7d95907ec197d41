"""Idle time of a pipeline rank in one step, closed forms; forward F, input gradient B, weight gradient W of one microbatch.

All times are those of a whole pipeline rank: a chunk of an interleaved schedule takes 1/v of them.

    GPipe, 1F1B             (p-1)(F + B + W)                   Narayanan et al. arXiv:2104.04473, section 2.2
    Interleaved1F1B, LoopedBFS    the same / v                 the same paper; Lamy-Poirier arXiv:2211.05953
    ZB-H1, ZB-H2            (p-1)(F + B - W), (p-1)(F + B - 2W) Qi et al. arXiv:2401.10241, table 2
    InterleavedZeroBubble   (p-1)(F + B - W) / v               ZB-H1's form on chunks
    ZBVZeroBubble           (p-1)(F + B - W) / 2 at most, 0 where F = B = W    arXiv:2405.15362
    DualPipeV               (p/2 - 1)(F&B + B' - 3W), B' = B + W, F&B = F + B'  DeepSeek-V3, arXiv:2412.19437, table 2

They are lower bounds: transfers and uneven stages come on top, and only a simulation of the schedule counts those exactly.
"""

from __future__ import annotations

from shoal.cost.plan import Schedule


def bubble_s(
    schedule: Schedule, *, pipeline: int, virtual_stages: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    """Seconds that a rank waits in one step, never below 0."""
    if pipeline == 1:
        return 0.0
    whole = forward_s + input_s + weight_s
    split = max(0.0, forward_s + input_s - weight_s)
    steps = pipeline - 1
    idle = {
        "GPipe": steps * whole,
        "1F1B": steps * whole,
        "Interleaved1F1B": steps * whole / virtual_stages,
        "LoopedBFS": steps * whole / virtual_stages,
        "ZB-H1": steps * split,
        "ZB-H2": steps * (split - weight_s),
        "InterleavedZeroBubble": steps * split / virtual_stages,
        "ZBVZeroBubble": steps * (abs(forward_s - weight_s) + abs(input_s - weight_s)) / 2,
        "DualPipeV": max(0, pipeline / 2 - 1) * (whole + input_s + weight_s - 3 * weight_s),
    }[schedule]
    return max(0.0, idle)
