"""The most bytes of activations that each pipeline rank holds, counted along its row of the table.

A forward stores M bytes for its stage and microbatch. A whole backward frees all of it; a split one keeps, from I to W,
the part that only the weights' gradient needs: M_W of it, with M_W = 32sbh of M = sbh(34 + 5as/h) for a GPT of 16 bits
(arXiv:2401.10241, section 2.3): inputs of the matrix products and the gradients of their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.schedules.table import Table


def stored_bytes(table: Table, *, stage_bytes: Sequence[float], weight_bytes: Sequence[float]) -> tuple[float, ...]:
    """Peak of each rank. `stage_bytes` is what a stage keeps of one microbatch, `weight_bytes` its part until W."""
    peaks = []
    for row in table.rows:
        held = peak = 0.0
        for kind, stage, _ in row:
            whole, late = stage_bytes[stage], weight_bytes[stage]
            held += {"F": whole, "B": -whole, "I": late - whole, "W": -late}[kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
