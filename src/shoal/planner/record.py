"""Predictions and constants as plain values, for JSON."""

from __future__ import annotations

from typing import Any

from shoal.planner.constants import Constants
from shoal.planner.predictor import Prediction


def prediction_record(one: Prediction) -> dict[str, Any]:
    """The plan, seconds and bytes by item, and what follows from them."""
    plan = one.plan
    return {
        "plan": plan.describe(),
        "layout": plan.layout.to_dict(),
        "microbatch": plan.microbatch,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "stages_per_rank": plan.virtual_stages,
        "zero": plan.zero,
        "recompute": plan.recompute,
        "sequence_parallel": plan.sequence_parallel,
        "step_s": one.step_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "memory_bytes": one.memory_bytes,
        "fits": one.fits,
        "bill_s": dict(one.bill.seconds),
        "memory": one.peak.items(),
    }


def constants_record(constants: Constants) -> list[dict[str, Any]]:
    """Every constant with its value and where it comes from."""
    return [{"name": name, "value": value, "origin": origin} for name, value, origin in constants.listed()]
