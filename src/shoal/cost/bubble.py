"""Idle time of a pipeline rank in one step, closed forms. F, B, W: forward, input and weight gradient of a microbatch.

All times are those of a whole pipeline rank: a chunk of an interleaved schedule takes 1/v of them.

    GPipe, 1F1B             (p-1)(F + B + W)                   Narayanan et al. arXiv:2104.04473, section 2.2
    Interleaved1F1B, LoopedBFS    the same / v                 the same paper; Lamy-Poirier arXiv:2211.05953
    ZB-H1, ZB-H2            (p-1)(F + B - W), (p-1)(F + B - 2W) Qi et al. arXiv:2401.10241, table 2
    InterleavedZeroBubble   (p-1)(F + B - W) / v               ZB-H1's form on chunks
    ZBVZeroBubble           (p-1)(F + B - W) / 2 at most, 0 where F = B = W    arXiv:2405.15362
    DualPipeV               (p/2 - 1)(F&B + B' - 3W), B' = B + W, F&B = F + B'  DeepSeek-V3, arXiv:2412.19437, table 2

In zero-bubble schedules weight gradients fill the gaps, and there are only as many of them as microbatches: with
fewer than the form fills, what is missing stays idle. All forms are lower bounds: transfers and uneven stages come on
top, and only a simulation of the schedule counts those exactly.
"""

from __future__ import annotations

from shoal.schedules.table import Schedule


def bubble_s(
    schedule: Schedule,
    *,
    pipeline: int,
    virtual_stages: int,
    microbatches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
) -> float:
    """Seconds that a rank waits in one step, never below 0."""
    if pipeline == 1:
        return 0.0
    steps, chunks = pipeline - 1, microbatches * virtual_stages
    whole = steps * (forward_s + input_s + weight_s)
    gap = steps * (forward_s + input_s)
    idle = {
        "GPipe": whole,
        "1F1B": whole,
        "Interleaved1F1B": whole / virtual_stages,
        "LoopedBFS": whole / virtual_stages,
        "ZB-H1": gap - min(steps, microbatches) * weight_s,
        "ZB-H2": gap - min(2 * steps, microbatches) * weight_s,
        "InterleavedZeroBubble": (gap - min(steps, chunks) * weight_s) / virtual_stages,
        "ZBVZeroBubble": steps * (abs(forward_s - weight_s) + abs(input_s - weight_s)) / 2,
        "DualPipeV": max(0, pipeline / 2 - 1) * (forward_s + 2 * input_s - weight_s),
    }[schedule]
    return max(0.0, idle)
