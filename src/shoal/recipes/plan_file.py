"""The plan that a run file asks for, and the run file of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import tomli_w

from shoal.config.check import checked
from shoal.config.load import read
from shoal.cost.plan import Plan, Zero
from shoal.recipes.rules import check_across
from shoal.recipes.run_file import RunFile
from shoal.topology.cluster import Cluster


def written_plan(run_file: RunFile, cluster: Cluster) -> Plan:
    """The plan that the run file itself asks for. Raises `LayoutError` where the devices cannot be so arranged."""
    layout = run_file.layout.layout(cluster.devices)
    ranks = layout.replicate * layout.shard
    share = max(1, run_file.batch.global_samples // ranks)
    pipelined = layout.pipeline > 1
    microbatches = run_file.pipeline.microbatches or 2 * layout.pipeline if pipelined else None
    micro = run_file.batch.micro_samples or (max(1, share // microbatches) if microbatches else share)
    zero = run_file.memory.zero or (3 if layout.shard > 1 else 0)
    return Plan(
        layout=layout,
        microbatch=micro,
        microbatches=max(1, share // micro),
        schedule=run_file.pipeline.schedule if pipelined else "1F1B",
        virtual_stages=run_file.pipeline.stages_each if pipelined else 1,
        zero=cast(Zero, zero),
        recompute=run_file.memory.recompute,
        sequence_parallel=run_file.layout.sequence_parallel,
    )


def run_file_of(path: Path, plan: Plan) -> str:
    """The run file at `path` with `plan` in it, as TOML. Raises `ConfigError` where this version cannot run it."""
    tables = _with_plan(read(path), plan)
    result = checked(tables, RunFile, file="the planned run file")
    check_across(result, file="the planned run file")
    return tomli_w.dumps(tables)


def _with_plan(tables: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The same tables with the keys that a plan decides; keys at their defaults are left out."""
    layout = {axis: size for axis, size in plan.layout.to_dict().items() if size > 1}
    if plan.sequence_parallel:
        layout["sequence_parallel"] = True
    result = {name: value for name, value in tables.items() if name not in ("layout", "pipeline", "memory")}
    result["run"] = {**tables.get("run", {}), "processes": plan.layout.world_size}
    result["batch"] = {**tables.get("batch", {}), "micro_samples": plan.microbatch}
    result["layout"] = layout
    memory = {"recompute": plan.recompute, **({"zero": plan.zero} if plan.zero and plan.layout.shard > 1 else {})}
    result["memory"] = memory
    if plan.layout.pipeline > 1:
        result["pipeline"] = {"schedule": plan.schedule, "microbatches": plan.microbatches}
        if plan.virtual_stages > 1:
            result["pipeline"]["stages_per_rank"] = plan.virtual_stages
    return result
