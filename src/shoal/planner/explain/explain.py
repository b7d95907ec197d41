"""Why this plan and not another, and what would help it most.

`why_not` takes the best plan under a condition ("tensor=8") and says what it would cost, and which constraint binds
where there is none. `helps` changes one thing at a time and ranks the changes: within the plan (recomputation, ZeRO,
microbatch) and outside of it (links or memory twice as fast).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import msgspec

from shoal import units
from shoal.cost.plan import Plan
from shoal.errors import LayoutError, UsageError
from shoal.planner.explain.text import Change, signed
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.workload import ITEMS
from shoal.planner.search.candidates import Allowed, candidates
from shoal.planner.search.search import fitting_memory, search
from shoal.topology.cluster import Cluster, Link

CONDITIONS = (
    "tensor",
    "pipeline",
    "context",
    "shard",
    "replicate",
    "expert",
    "microbatch",
    "zero",
    "loss_chunks",
    "recompute",
    "schedule",
)


def condition(text: str, allowed: Allowed) -> Allowed:
    """`allowed` narrowed by "tensor=8" or "zero=3,recompute=full". Raises `UsageError` for an unknown name."""
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in CONDITIONS or not value:
            raise UsageError(
                f"'{part}' is no condition on a plan: write NAME=VALUE with one of {', '.join(CONDITIONS)}"
            )
        allowed = replace(allowed, **_narrowed(name, value))
    return allowed


def why_not(predictor: Predictor, text: str, best: Prediction, *, allowed: Allowed) -> str:
    """What the condition would cost, item by item against `best`; or which constraint binds.

    The rest of the best plan is kept where a plan with the condition can keep it and fits; else it is searched for.
    """
    asked = {part.partition("=")[0].strip() for part in text.split(",")}
    narrowed = condition(text, allowed).within(predictor.abilities)
    if "schedule" in asked and "pipeline" not in asked and best.plan.layout.pipeline == 1:
        return f"{text}: the best plan has no pipeline, and so no schedule; ask for pipeline=2,{text}"
    if next(candidates(predictor.workload, predictor.cluster, narrowed), None) is None:
        return f"{text}: no legal plan has it. {_broken_rule(predictor, narrowed)}"
    kept = condition(text, _like(best.plan, allowed, text)).within(predictor.abilities)
    other, rest = _best(predictor, kept), "the best plan with it, all else kept, is"
    if other is None:
        try:
            other, rest = search(predictor, narrowed, keep=1).best[0], "nothing else can be kept; the best such plan is"
        except LayoutError as error:
            return f"{text}: {error}"
    slower = other.step_s / best.step_s - 1
    lines = [f"{text}: {rest} {other.plan.describe()}"]
    lines.append(
        f"  {units.seconds(other.step_s)} a step, {signed(100 * slower)} % against {units.seconds(best.step_s)}"
    )
    lines.append(f"  {units.memory_size(other.memory_bytes)} against {units.memory_size(best.memory_bytes)}")
    lines += [
        f"  {name}: {'+' if value >= 0 else ''}{units.seconds(value)} ({ITEMS[name]})"
        for name, value in _differences(other, best)
    ]
    return "\n".join(lines)


def _like(plan: Plan, allowed: Allowed, text: str) -> Allowed:
    """`allowed` narrowed to what `plan` is, but for the conditions' own names and what follows from them."""
    asked = {part.partition("=")[0].strip() for part in text.split(",")}
    values: dict[str, Any] = {name: getattr(plan.layout, name) for name in plan.layout.to_dict()}
    values |= {"microbatch": plan.microbatch, "zero": (plan.zero,), "recompute": (plan.recompute,)}
    values |= {"schedule": (plan.schedule,), "loss_chunks": (plan.loss_chunks,)}
    if asked & set(plan.layout.to_dict()):  # ranks that one axis takes are missing elsewhere
        values = {name: value for name, value in values.items() if name not in ("replicate", "shard", "zero")}
    kept = {name: value for name, value in values.items() if name not in asked}
    if "schedule" in kept:
        kept["schedules"] = kept.pop("schedule")
    return replace(allowed, **kept)


def _best(predictor: Predictor, allowed: Allowed) -> Prediction | None:
    """None where no plan is legal, or none fits."""
    plans = (plan for plan in candidates(predictor.workload, predictor.cluster, allowed))
    fitting = (plan for plan in plans if fitting_memory(predictor, plan) is not None)
    found = min(fitting, key=lambda plan: predictor.bill(plan).total, default=None)
    return None if found is None else predictor.predict(found)


def helps(predictor: Predictor, best: Prediction) -> list[Change]:
    """Changes of the plan and of the machine, fastest first. A measured machine is what it is."""
    changes = [_change(what, predictor, plan) for what, plan in _other_plans(best.plan, predictor) if plan != best.plan]
    for what, cluster in _other_clusters(predictor.cluster) if predictor.measured is None else ():
        changes.append(_change(what, predictor.on(cluster), best.plan))
    return sorted(changes, key=lambda change: change.step_s)


def _change(what: str, predictor: Predictor, plan: Plan) -> Change:
    one = predictor.predict(plan)
    return Change(what=what, step_s=one.step_s, memory_bytes=one.memory_bytes, fits=one.fits)


def _other_plans(plan: Plan, predictor: Predictor) -> Iterator[tuple[str, Plan]]:
    for kind in Allowed().within(predictor.abilities).recompute:
        if not (kind == "selective" and predictor.stack.flash_attention):
            yield f"memory.recompute = {kind}", replace(plan, recompute=kind)
    if plan.layout.shard > 1:
        for stage in (1, 2, 3):
            yield f"memory.zero = {stage}", replace(plan, zero=stage)
    if plan.microbatches % 2 == 0:
        twice = replace(plan, microbatch=2 * plan.microbatch, microbatches=plan.microbatches // 2)
        yield "microbatches twice as large", twice
    if plan.microbatch % 2 == 0:
        half = replace(plan, microbatch=plan.microbatch // 2, microbatches=2 * plan.microbatches)
        yield "microbatches half as large", half


def _other_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    machine = cluster.machine
    faster = {"scale_up": "links in a node twice as fast", "scale_out": "links between nodes twice as fast"}
    for name, what in faster.items():
        link: Link = getattr(machine, name)
        parts: dict[str, Any] = {name: msgspec.structs.replace(link, gb_s=2 * link.gb_s)}
        yield what, msgspec.structs.replace(cluster, machine=msgspec.structs.replace(machine, **parts))
    device = msgspec.structs.replace(machine.device, memory_gb_s=2 * machine.device.memory_gb_s)
    yield (
        "memory twice as fast",
        msgspec.structs.replace(cluster, machine=msgspec.structs.replace(machine, device=device)),
    )


def _differences(other: Prediction, best: Prediction) -> list[tuple[str, float]]:
    """Items that differ by at least a hundredth of the step, largest first."""
    both = {name: other.bill.seconds.get(name, 0.0) - best.bill.seconds.get(name, 0.0) for name in ITEMS}
    seen = [(name, value) for name, value in both.items() if abs(value) >= 0.01 * best.step_s]
    return sorted(seen, key=lambda pair: -abs(pair[1]))


def _narrowed(name: str, value: str) -> dict[str, Any]:
    if name == "recompute":
        return {"recompute": (value,)}
    if name == "schedule":
        return {"schedules": (value,)}
    if not value.isdigit():
        raise UsageError(f"{name}={value}: the value is a whole number, such as {name}=2")
    return {name: (int(value),)} if name in ("zero", "loss_chunks") else {name: int(value)}


def _broken_rule(predictor: Predictor, allowed: Allowed) -> str:
    """The axes that were asked for, and what each must divide."""
    model, world = predictor.workload.model, predictor.cluster.devices
    rules = {
        "tensor": predictor.tensor_rule(allowed.tensor or 1),
        "pipeline": f"pipeline must divide {world} devices and leave each rank some of {model.layers} layers",
        "context": f"context must divide {world} devices and a sample of {predictor.workload.sequence} tokens evenly",
        "shard": f"replicate x shard must divide {world} devices and {predictor.workload.global_samples} samples",
        "expert": f"expert must divide {model.experts} experts and the ranks of shard x context x tensor",
        "microbatch": f"the microbatch must divide a rank's part of {predictor.workload.global_samples} samples",
    }
    asked = [field.name for field in fields(allowed) if getattr(allowed, field.name) is not None]
    return "; ".join(rules[name] for name in asked if name in rules) or "the other axes leave no room for it"
