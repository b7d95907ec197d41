"""`shoal simulate`: plays the run at any scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.arguments import AsJson, ClusterFile, Overrides, RunFileArgument, output_file, picture_file
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.planner.simulate.work import Stragglers
    from shoal.planning.simulating import Simulated
    from shoal.runfile.run_file import RunFile


def simulate(
    run_file: RunFileArgument,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="OUT.json", help="Write the step's timeline for Perfetto.", callback=output_file
        ),
    ] = None,
    weeks: Annotated[
        float, typer.Option(help="Weeks of training with failures; 0: the step only.", min=0, max=520)
    ] = 0,
    save_every: Annotated[
        float | None, typer.Option("--save-every", help="Seconds of training between saves; default: the best.", min=1)
    ] = None,
    save_stall: Annotated[
        float | None,
        typer.Option("--save-stall", help="Seconds that a save holds the job up; default: by its bytes.", min=0),
    ] = None,
    noise: Annotated[float, typer.Option(help="Sigma of the lognormal noise on every action.", min=0, max=2)] = 0,
    slow_share: Annotated[
        float, typer.Option("--slow-share", help="Share of devices that are slow.", min=0, max=1)
    ] = 0,
    slow_factor: Annotated[float, typer.Option("--slow-factor", help="How much longer they take.", min=1)] = 1,
    beyond_memory: Annotated[
        bool, typer.Option("--beyond-memory", help="Also where a rank needs more memory than its device has.")
    ] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Only the pipeline's schedule: a line a rank, time to the right.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="OUT.png", help="Draw the schedule (png, svg, pdf).", callback=picture_file),
    ] = None,
    seed: Annotated[int, typer.Option(help="Noise, slow devices and failures follow from it.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Plays the run's own layout: schedule, network, stragglers, failures. Deterministic by seed.

    Example: shoal simulate recipes/stdlib-gpt-3d.toml --weeks 1 --trace out.json

    Example: shoal simulate recipes/stdlib-gpt-3d.toml --schedule --picture schedule.png
    """
    from shoal.runfile.load import load_run
    from shoal.topology.cluster_file import load_cluster

    loaded = load_run(run_file, overrides or ())
    if cluster is not None:
        load_cluster(cluster)  # wrong files are refused before what follows imports torch
    from shoal.planner.simulate.outcome import trace as traced
    from shoal.planner.simulate.work import Stragglers
    from shoal.planning.answer import cluster_file
    from shoal.planning.simulating import Saving, simulated

    where = cluster_file(loaded.layout.cluster, cluster)
    stragglers = Stragglers(slow_share=slow_share, slow_factor=slow_factor, sigma=noise, seed=seed)
    if schedule or picture is not None:
        if trace is not None or weeks:
            raise typer.BadParameter("the schedule alone has no trace and no weeks; leave --schedule and --picture out")
        _show_schedule(loaded, where, stragglers, picture=picture, as_json=as_json)
        return
    with busy("simulating"):
        result = simulated(
            loaded,
            where,
            stragglers=stragglers,
            weeks=weeks,
            saving=Saving(every_s=save_every, save_s=save_stall),
            beyond_memory=beyond_memory,
        )
    if trace is not None:
        trace.write_text(json.dumps(traced(result.outcome.step)), encoding="utf-8")
    if as_json:
        answer(json.dumps(result.record()))
        return
    for part in _as_text(result):
        print(part, end="\n\n")
    if trace is not None:
        print(f"Written: {trace}; open it in ui.perfetto.dev")


def _show_schedule(
    run_file: RunFile, cluster: Path | None, stragglers: Stragglers, *, picture: Path | None, as_json: bool
) -> None:
    from shoal.planning.pictures import schedule_view

    with busy("playing the schedule"):
        view = schedule_view(run_file, cluster, stragglers=stragglers)
    if picture is not None:
        with busy(f"drawing {picture}"):
            view.draw(picture)
    answer(json.dumps(view.record()) if as_json else view.text())
    if picture is not None and not as_json:
        print(f"Written: {picture}")


def _as_text(result: Simulated) -> list[str]:
    from shoal import units
    from shoal.planner.explain.text import money
    from shoal.planner.simulate import outcome as text

    cluster, weeks = result.predictor.cluster, result.weeks
    parts = [
        f"{cluster.name}: {cluster.nodes} x {cluster.machine.devices} {cluster.device.name}; {result.plan.describe()}",
        text.step(result.outcome, predicted_s=result.prediction.step_s),
        text.ranks(result.outcome, result.memory_bytes, limit_bytes=cluster.device.memory_bytes),
    ]
    if result.codec.codec != "none":
        one = result.codec
        parts.append(
            f"Sums over replicas are coded by {one.codec}: a rank sends {units.memory_size(one.sent_bytes)} a step, "
            f"{units.seconds(one.wire_s)} of the wire, codes for {units.seconds(one.coding_s)}, and keeps "
            f"{units.memory_size(one.residual_bytes)} of residuals"
        )
    need, have = max(result.memory_bytes), cluster.device.memory_bytes
    if need > have:
        parts.insert(1, f"WARNING: {text.does_not_fit(need, limit_bytes=have, device=cluster.device.name)}")
    if weeks is not None:
        parts += [
            text.weeks(
                weeks.goodput,
                every_s=weeks.every_s,
                stall_s=weeks.save_stall_s,
                between_s=weeks.between_failures_s,
                steps=weeks.steps,
            ),
            money({"money": weeks.money, "energy, kWh": weeks.energy_kwh}),
        ]
    return parts
