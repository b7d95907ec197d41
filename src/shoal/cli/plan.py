"""`shoal plan`: what fits, how fast, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal.recipes.planning import Planned


def plan(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="Keys that replace the file's.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="C.toml", help="The machine; default: CPU cores of this one.")
    ] = None,
    top: Annotated[int, typer.Option(help="Plans to show.", min=1, max=1000)] = 10,
    why_not: Annotated[
        str | None, typer.Option("--why-not", metavar="tensor=8", help="What the best plan with this would cost.")
    ] = None,
    emit: Annotated[
        Path | None, typer.Option("--emit", metavar="OUT.toml", help="Write the run file of the best plan.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Ranks the layouts that fit; predicts memory and time; explains.

    Example: shoal plan recipes/stdlib-gpt.toml --why-not tensor=2
    """
    from shoal.recipes.plan_file import run_file_of
    from shoal.recipes.planning import planned
    from shoal.recipes.rules import load_run

    result = planned(load_run(run_file, overrides or ()), cluster, keep=top, why_not=why_not)
    if emit is not None:
        emit.write_text(run_file_of(run_file, result.found.best[0].plan), encoding="utf-8")
    if as_json:
        print(json.dumps(_as_json(result)))
        return
    for part in _as_text(result):
        print(part, end="\n\n")
    if emit is not None:
        print(f"Written: {emit}")


def _as_text(result: Planned) -> list[str]:
    from shoal.planner import text

    best, cluster = result.found.best[0], result.predictor.cluster
    limit = cluster.device.memory_bytes
    parts = [
        f"{cluster.name}: {cluster.nodes} x {cluster.machine.devices} {cluster.device.name}; "
        f"{result.found.considered} legal plans, {result.found.fitting} fit",
        text.plans(result.found.best),
        "Best plan: " + best.plan.describe(),
        text.bill(best.bill),
        text.memory(best.peak, limit),
        text.changes(result.changes, best),
        "No plan is both faster and smaller than these:\n" + text.plans(result.found.front[:10]),
    ]
    if result.written is not None:
        parts.insert(1, "The run file as it stands:\n" + text.plans([result.written]))
    if result.money is not None:
        parts.append(text.money(result.money))
    return parts + ([result.why_not] if result.why_not else [])


def _as_json(result: Planned) -> dict[str, Any]:
    from shoal.planner.record import constants_record, prediction_record

    found, cluster = result.found, result.predictor.cluster
    return {
        "cluster": {"name": cluster.name, "nodes": cluster.nodes, "devices": cluster.devices},
        "considered": found.considered,
        "fitting": found.fitting,
        "plans": [prediction_record(one) for one in found.best],
        "front": [prediction_record(one) for one in found.front],
        "written": prediction_record(result.written) if result.written else None,
        "changes": [
            {"what": c.what, "step_s": c.step_s, "memory_bytes": c.memory_bytes, "fits": c.fits} for c in result.changes
        ],
        "why_not": result.why_not,
        "money": result.money,
        "constants": constants_record(result.predictor.constants),
    }
