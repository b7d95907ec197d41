"""Predictions, choices and constants as plain values, for JSON."""

from __future__ import annotations

from typing import Any

from shoal.planner.explain.residuals import Residuals
from shoal.planner.predict.predictor import Prediction
from shoal.planner.predict.workload import Constants
from shoal.planner.search.scaling import SizedPlan


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
        "loss_chunks": plan.loss_chunks,
        "sequence_parallel": plan.sequence_parallel,
        "step_s": one.step_s,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "memory_bytes": one.memory_bytes,
        "fits": one.fits,
        "bill_s": dict(one.bill.seconds),
        "memory": one.peak.items(),
    }


def confidence_record(
    one: Prediction, limit_bytes: float, *, time: Residuals | None, memory: Residuals
) -> dict[str, Any]:
    """The interval of the step (None where its rates are assumed), the odds of running out of memory, their sources."""
    return {
        "level": 0.9,
        "step_s": None if time is None else list(time.interval(one.step_s)),
        "step_source": "assumed rates" if time is None else time.source,
        "out_of_memory": memory.exceeds(one.memory_bytes, limit_bytes),
        "memory_source": memory.source,
    }


def choice_record(one: SizedPlan) -> dict[str, Any]:
    """A number of devices, its plan, and what the whole run takes and costs."""
    return {
        "devices": one.devices,
        "plan": one.prediction.plan.describe(),
        "step_s": one.prediction.step_s,
        "wall_s": one.cost.wall_s,
        "memory_bytes": one.prediction.memory_bytes,
        "device_hours": one.device_hours,
        "money": one.cost.money,
    }


def constants_record(constants: Constants) -> list[dict[str, Any]]:
    """Every constant with its value and where it comes from."""
    return [{"name": name, "value": value, "origin": origin} for name, value, origin in constants.listed()]
