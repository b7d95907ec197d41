"""How many microbatches' activations a pipeline rank holds at its peak, in units of one microbatch of its whole rank.

GPipe, LoopedBFS      m                                     Huang et al. arXiv:1811.06965
1F1B                  min(m, p - i), rank i from 0          Narayanan et al. arXiv:2006.09503
Interleaved1F1B       at most p (1 + (p-1)/(pv))            Korthikanti et al. arXiv:2205.05198
InterleavedZeroBubble as Interleaved1F1B                    ZB-H1's memory rule, arXiv:2401.10241
ZBVZeroBubble         p on every rank                       arXiv:2405.15362: 1F1B's peak, balanced
DualPipeV             p + 1, with the parameters of 2 ranks DeepSeek-V3, arXiv:2412.19437
"""

from __future__ import annotations

from shoal.schedules.names import Schedule


def in_flight(schedule: Schedule, rank: int, *, pipeline: int, virtual_stages: int, microbatches: int) -> float:
    """Microbatches held by pipeline rank `rank`, at most `microbatches`. `rank` counts from 0, the first stage."""
    if pipeline == 1:
        return 1.0
    first_come = float(pipeline - rank)
    held = {
        "GPipe": float(microbatches),
        "LoopedBFS": float(microbatches),
        "1F1B": first_come,
        "ZB-H1": first_come,
        "ZB-H2": 2 * first_come - 1,
        "Interleaved1F1B": _interleaved(rank, pipeline, virtual_stages),
        "InterleavedZeroBubble": _interleaved(rank, pipeline, virtual_stages),
        "ZBVZeroBubble": float(pipeline),
        "DualPipeV": float(pipeline + 1),
    }[schedule]
    return min(float(microbatches), held)


def _interleaved(rank: int, pipeline: int, virtual_stages: int) -> float:
    """Megatron's warm-up of 2(p - i - 1) + (v - 1)p chunks, one more in work, each 1/v of a rank."""
    return (2 * (pipeline - rank - 1) + (virtual_stages - 1) * pipeline + 1) / virtual_stages
