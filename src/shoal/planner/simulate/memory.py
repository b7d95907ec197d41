"""The most bytes of activations that each pipeline rank holds, counted along its row of the table.

A forward stores M bytes for its stage and microbatch. A whole backward frees all of it; a split one keeps, from I to W,
the part that only the weights' gradient needs: M_W of it, with M_W = 32sbh of M = sbh(34 + 5as/h) for a GPT of 16 bits
(arXiv:2401.10241, section 2.3): inputs of the matrix products and the gradients of their outputs.

Peak memory of each pipeline rank as its row of the table fills and empties it.

Everything but the activations is the planner's own footprint; activations are counted along the row, so that a split
backward, uneven stages and interleaving are what they are, and no closed form stands for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cost.plan import Plan
from shoal.planner.predict.predictor import Predictor
from shoal.planner.simulate.work import stage_layers
from shoal.schedules.table import ScheduleTable


def stored_bytes(
    table: ScheduleTable, *, stage_bytes: Sequence[float], weight_bytes: Sequence[float]
) -> tuple[float, ...]:
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


WEIGHT_NUMBERS = 16
"""Numbers of the hidden width that a token's weight gradients need in a layer: inputs of its products h + h + h + 4h
and gradients of their outputs 3h + h + 4h + h, 32sbh bytes of 16 bits (arXiv:2401.10241, section 2.3)."""


def rank_bytes(
    plan: Plan, predictor: Predictor, table: ScheduleTable, *, layers: Sequence[int] | None = None
) -> tuple[float, ...]:
    """Bytes of every pipeline rank at its peak; `layers` of each stage, the simulator's own cut unless given."""
    model, layout, stack = predictor.workload.model, plan.layout, predictor.stack
    tokens = plan.microbatch * predictor.workload.sequence / layout.context
    whole = predictor.block_bytes(plan)
    late = min(whole, WEIGHT_NUMBERS * stack.kept.element_bytes * tokens * model.hidden / layout.tensor)
    layers = layers or stage_layers(plan, predictor)
    stored = stored_bytes(table, stage_bytes=[n * whole for n in layers], weight_bytes=[n * late for n in layers])
    return tuple(_total(plan, predictor, rank, held) for rank, held in enumerate(stored))


def _total(plan: Plan, predictor: Predictor, rank: int, activations: float) -> float:
    """The footprint with these activations in the place of its own."""
    closed = predictor.footprint(plan, rank)
    return closed.total + (activations - closed.activations) * (1 + predictor.overheads.slack_share)
