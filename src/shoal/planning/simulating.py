"""A run file and a cluster -> one simulated step, and simulated weeks: the whole answer of `shoal simulate`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.cost.interval import availability_optimal_s
from shoal.cost.plan import Plan
from shoal.errors import LayoutError
from shoal.planner.explain.codecs import CodecPrice, codec_price
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.run_cost import save_of
from shoal.planner.simulate.goodput import WEEK_S, Faults, Goodput, goodput
from shoal.planner.simulate.outcome import StepFigures, does_not_fit, outcome
from shoal.planner.simulate.step import Fold
from shoal.planner.simulate.work import Stragglers, rank_bytes, work_of
from shoal.planning.answer import predictor_of, transformer_of
from shoal.planning.plan_file import written_plan
from shoal.runfile.run_file import RunFile
from shoal.schedules.build import build
from shoal.schedules.table import ScheduleTable
from shoal.topology.failures import failures_per_s


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How often the job saves, and what a save holds it up.

    `every_s` None: the availability-optimal interval, but no less than storage takes for the save before. `save_s`
    None: what follows from the bytes of the state (`planner.predict.run_cost`).
    """

    every_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Weeks:
    """Simulated weeks, and what they cost; None where the cluster states no price or power.

    `between_failures_s` is the job's mean time between failures, None where its devices do not fail.
    """

    goodput: Goodput
    between_failures_s: float | None
    save_stall_s: float
    save_write_s: float
    every_s: float
    steps: float
    money: float | None
    energy_kwh: float | None


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """All that `shoal simulate` shows."""

    predictor: Predictor
    plan: Plan
    prediction: Prediction
    outcome: StepFigures
    memory_bytes: tuple[float, ...]
    codec: CodecPrice
    weeks: Weeks | None

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        one, cluster = self.outcome, self.predictor.cluster
        return {
            "cluster": {"name": cluster.name, "nodes": cluster.nodes, "devices": cluster.devices},
            "plan": self.plan.describe(),
            "step_s": one.step_s,
            "predicted_s": self.prediction.step_s,
            "tokens_per_s": self.predictor.workload.tokens / one.step_s,
            "bubble": one.bubble,
            "phase_s": one.phase_s,
            "period_s": one.period_s,
            "exposed_s": one.exposed_s,
            "inside_s": one.inside_s,
            "gradients": asdict(self.codec),
            "ranks": [asdict(share) for share in one.ranks],
            "memory_bytes": list(self.memory_bytes),
            "fits": max(self.memory_bytes) <= cluster.device.memory_bytes,
            "weeks": None if self.weeks is None else _weeks_record(self.weeks),
        }


def simulated(
    run_file: RunFile,
    cluster: Path | None,
    *,
    stragglers: Stragglers,
    weeks: float = 0.0,
    saving: Saving | None = None,
    beyond_memory: bool = False,
) -> Simulated:
    """Plays the run file's own plan; one that does not fit only with `beyond_memory`.

    Raises:
        ConfigError: the model has no closed form.
        LayoutError: the layout is not the cluster's, or its fullest rank needs more memory than a device has.
    """
    transformer_of(run_file.model)  # refuses the models that have no closed form
    predictor = predictor_of(run_file, cluster)
    plan = written_plan(run_file, predictor.cluster)
    table = table_of(plan)
    memory_bytes = rank_bytes(plan, predictor, table)
    if not beyond_memory:
        _check_memory(max(memory_bytes), predictor)
    played = outcome(table, work_of(plan, predictor), fold=fold_of(plan, stragglers), stragglers=stragglers)
    prediction = predictor.predict(plan)
    return Simulated(
        predictor=predictor,
        plan=plan,
        prediction=prediction,
        codec=codec_price(predictor, prediction),
        outcome=played,
        memory_bytes=memory_bytes,
        weeks=_weeks(predictor, plan, played.step_s, weeks, saving or Saving(), seed=stragglers.seed)
        if weeks
        else None,
    )


def _check_memory(need_bytes: float, predictor: Predictor) -> None:
    device = predictor.cluster.device
    if need_bytes > device.memory_bytes:
        sentence = does_not_fit(need_bytes, limit_bytes=device.memory_bytes, device=device.name)
        raise LayoutError(f"{sentence}, and --beyond-memory simulates this one")


def table_of(plan: Plan) -> ScheduleTable:
    """The schedule that the executor runs. Raises `LayoutError` for sizes that it does not take."""
    if plan.layout.pipeline == 1:
        return build("1F1B", ranks=1, microbatches=plan.microbatches)
    return build(
        plan.schedule,
        ranks=plan.layout.pipeline,
        microbatches=plan.microbatches,
        stages_per_rank=plan.virtual_stages,
    )


def fold_of(plan: Plan, stragglers: Stragglers) -> Fold:
    """Replicas are folded where all do the same; peers that wait for each other in every layer always."""
    peers = plan.layout.context * plan.layout.tensor
    return Fold(replicas=plan.data_parallel, peers=peers, fold_replicas=stragglers.even)


def _weeks(predictor: Predictor, plan: Plan, step_s: float, weeks: float, saving: Saving, *, seed: int) -> Weeks:
    cluster, wall_s = predictor.cluster, weeks * WEEK_S
    rate = failures_per_s(cluster)
    one = save_of(predictor, plan)
    faults = Faults(
        between_s=1 / rate if rate else math.inf,
        recovery_s=cluster.reliability.recovery_s,
        save_s=one.stall_s if saving.save_s is None else saving.save_s,
    )
    every_s = saving.every_s or min(wall_s, max(one.write_s, _best_every_s(faults)))
    found = goodput(faults, every_s=every_s, wall_s=wall_s, seed=seed)
    hours, price = wall_s / 3600 * cluster.devices, cluster.price
    return Weeks(
        goodput=found,
        between_failures_s=1 / rate if rate else None,
        save_stall_s=faults.save_s,
        save_write_s=one.write_s,
        every_s=every_s,
        steps=found.trained_s / step_s,
        money=None if price.device_hour is None else price.device_hour * hours,
        energy_kwh=None if price.device_watts is None else price.device_watts * hours / 1e3,
    )


def _best_every_s(faults: Faults) -> float:
    """Seconds of training between saves; no failures: none needed."""
    if math.isinf(faults.between_s):
        return math.inf
    return availability_optimal_s(faults.save_s, faults.between_s, recovery_s=faults.recovery_s) - faults.save_s


def _weeks_record(weeks: Weeks) -> dict[str, Any]:
    return {**asdict(weeks), "effective_share": weeks.goodput.effective_share}
