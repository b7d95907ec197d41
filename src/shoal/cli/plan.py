"""`shoal plan`: what fits, how fast, and why."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.arguments import AsJson, ClusterFile, Overrides, RunFileArgument, output_file, output_folder
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.planner.search.scaling import Scaled
    from shoal.planning.answer import Planned
    from shoal.planning.history import Confidence
    from shoal.planning.measured_step import MeasuredStep
    from shoal.planning.operator_splits import OperatorSplits
    from shoal.planning.trial import PlanTrial
    from shoal.runfile.run_file import RunFile


MOST_PLANS, FEW_PLANS, FEW_HELPS = 10, 5, 2


def plan(
    run_file: RunFileArgument,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    top: Annotated[int | None, typer.Option(help="Plans to show; default: 5, with --all 10.", min=1, max=1000)] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also time and memory item by item, every change and codec that was tried, and the cost."
        ),
    ] = False,
    why_not: Annotated[
        str | None, typer.Option("--why-not", metavar="tensor=8", help="What the best plan with this would cost.")
    ] = None,
    measure: Annotated[
        int, typer.Option("--measure", metavar="N", help="Try the best N here, for some steps each.", min=0, max=100)
    ] = 0,
    emit: Annotated[
        Path | None,
        typer.Option(
            "--emit",
            metavar="OUT.toml",
            help="Write the run file of the best plan: the fastest one tried, else the fastest predicted.",
            callback=output_file,
        ),
    ] = None,
    measured_step: Annotated[
        float | None,
        typer.Option(
            "--measured-step",
            metavar="SECONDS",
            help="A step that was measured on this cluster, or on one of the same devices: calibrates all predictions.",
            min=1e-9,
        ),
    ] = None,
    of: Annotated[
        Path | None,
        typer.Option("--of", metavar="RUN.toml", help="The run that was measured; default: RUN.toml as it stands."),
    ] = None,
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            "--expert-imbalance",
            metavar="X",
            help="Of a mixture: what the fullest expert of a step gets over the mean. Default: as in an earlier run "
            "here, else 1.",
            min=1,
        ),
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Also on a quarter to four times the devices: time, memory, money.")
    ] = False,
    pictures: Annotated[
        Path | None,
        typer.Option(
            "--pictures",
            metavar="FOLDER",
            help="Write memory, scaling and pipeline as pictures.",
            callback=output_folder,
        ),
    ] = None,
    operators: Annotated[
        int | None,
        typer.Option("--operators", metavar="N", help="A split of each operator over N ranks, beside the roles'."),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            "--elsewhere", metavar="RUN_DIR", help="Only what this run, measured here, would take on other machines."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ranks the layouts that fit; predicts memory and time; explains.

    Example: shoal plan recipes/stdlib-gpt.toml --why-not tensor=2
    """
    from shoal.runfile.load import load_run
    from shoal.runfile.run_file import with_processes
    from shoal.topology.cluster_file import load_cluster

    loaded = load_run(run_file, overrides or ())
    if expert_imbalance is not None and loaded.model.variant != "moe":
        raise typer.BadParameter(
            f'--expert-imbalance: model.kind = "{loaded.model.variant}" has no experts that a plan prices; leave it out'
        )
    if of is not None and measured_step is None:
        raise typer.BadParameter("--of names the run of a measured step; add --measured-step SECONDS")
    if cluster is not None:
        load_cluster(cluster)  # wrong files are refused before what follows imports torch
    from shoal.planner.search.scaling import scaling_of
    from shoal.planning.answer import cluster_file, planned
    from shoal.planning.history import confidence_in
    from shoal.planning.measured_step import step_of_earlier_run
    from shoal.planning.memory_budget import foreseen
    from shoal.planning.mixtures import with_values
    from shoal.planning.pictures import draw_plan
    from shoal.planning.plan_file import run_file_of
    from shoal.planning.tried_step import tried_step

    asked, loaded = loaded, with_values(loaded, {"memory.budget": None})  # plans are those of the run without
    if prediction is not None:
        _show_elsewhere(loaded, prediction, as_json=as_json)
        return
    where = cluster_file(loaded.layout.cluster, cluster)
    step = _measured_step(measured_step, of, loaded, expert_imbalance or 1.0)
    if step is None and where is None:
        step = step_of_earlier_run(loaded, host=socket.gethostname())
        with busy("measuring the model's own step for two seconds"):
            step = step or tried_step(loaded)
    with busy("searching the layouts that fit"):
        result = planned(
            loaded,
            where,
            keep=max(top or MOST_PLANS, measure),
            why_not=why_not,
            measured_step=step,
            expert_imbalance=expert_imbalance,
        )
    with busy("pricing what memory.budget may choose") if asked.memory.budget is not None else nullcontext():
        budget = foreseen(with_processes(asked, result.predictor.cluster.devices), where)
    trials = _trials(run_file, result, overrides or (), measure) if measure else []
    confidence = confidence_in(result.predictor, os.environ, evidence=result.evidence)
    best = result.found.best[0]
    with busy("planning for other numbers of devices"):
        scaled = scaling_of(result.predictor, best, steps=loaded.run.steps) if scaling or pictures is not None else None
    written = (
        [] if pictures is None or scaled is None else draw_plan(pictures, result.predictor, best.plan, scaled.curve)
    )
    if emit is not None:
        chosen = trials[0].prediction if trials else best
        emit.write_text(run_file_of(run_file, chosen.plan, overrides or ()), encoding="utf-8")
        written.append(emit)
    splits = None if operators is None else _splits(loaded, result, operators)
    if as_json:
        shown = _as_json(result, confidence, scaled)
        shown |= {"operators": None if splits is None else splits.record(), "trials": [one.record() for one in trials]}
        shown |= {"memory_budget": budget}
        answer(json.dumps(shown))
        return
    shown = top or (MOST_PLANS if everything else FEW_PLANS)
    text = _whole(result, confidence, shown) if everything else _screen(result, confidence, shown)
    for part in [*text, *_asked_for(result, scaled), *([] if splits is None else [splits.text()])]:
        print(part, end="\n\n")
    if budget is not None:
        print(budget, end="\n\n")
    if trials:
        print("Tried on this machine, fastest first:\n" + _trials_text(trials), end="\n\n")
    for path in written:
        print(f"Written: {path}")


def _show_elsewhere(run_file: RunFile, directory: Path, *, as_json: bool) -> None:
    from shoal.planning import elsewhere

    run = elsewhere.measured_run(run_file, directory)
    with busy("searching the layouts that fit other machines"):
        found = elsewhere.elsewhere(run)
    answer(json.dumps(elsewhere.as_record(run, found)) if as_json else elsewhere.as_text(run, found))


def _measured_step(
    step_s: float | None, of: Path | None, planned_for: RunFile, imbalance: float
) -> MeasuredStep | None:
    """The measured step, on the cluster that its own run file names, else on the planned one; its experts as uneven as
    they are said to be.
    """
    from shoal.planning.answer import cluster_file
    from shoal.planning.measured_step import MeasuredStep
    from shoal.runfile.load import load_run

    if step_s is None:
        return None
    run_file = planned_for if of is None else load_run(of, ())
    cluster = None if of is None else cluster_file(run_file.layout.cluster, None)
    return MeasuredStep(run_file=run_file, step_s=step_s, cluster=cluster, expert_imbalance=imbalance)


def _trials(path: Path, result: Planned, overrides: Sequence[str], number: int) -> list[PlanTrial]:
    from shoal.observe.terminal import open_progress_bar
    from shoal.planning.trial import check_here, tried

    check_here(result.predictor.cluster, os.environ)

    with open_progress_bar(sys.stderr) as bar:
        return tried(path, result.found.best[:number], overrides=overrides, environ=os.environ, bar=bar)


def _trials_text(trials: Sequence[PlanTrial]) -> str:
    from shoal import units
    from shoal.planner.explain.text import signed, table

    rows, failures = [], []
    for one in trials:
        name, predicted_s = one.prediction.plan.describe(), one.prediction.step_s
        if one.measured_s is None:
            failures.append(f"{name} did not run: {one.failure}")
            continue
        rows.append(
            (
                name,
                units.seconds(one.measured_s),
                units.seconds(predicted_s),
                f"{signed(100 * (predicted_s / one.measured_s - 1))} %",
            )
        )
    return "\n\n".join([table(("plan", "step", "predicted", "off"), rows), *failures])


def _splits(run_file: RunFile, result: Planned, ranks: int) -> OperatorSplits:
    from shoal.planning.operator_splits import operator_splits

    return operator_splits(run_file, result.predictor, result.found.best[0].plan, ranks=ranks)


def _head(result: Planned, shown: int) -> list[str]:
    """What was planned for, the run file as it stands, and the fastest plans."""
    from shoal.planner.explain import text

    cluster = result.predictor.cluster
    rate = "tokens/s" if result.predictor.workload.sequence > 1 else "samples/s"
    written = [] if result.written is None else [result.written]
    found = [one for one in result.found.best[:shown] if result.written is None or one.plan != result.written.plan]
    title = "The run file as it stands, then the fastest plans:\n" if written else "The fastest plans:\n"
    return [
        f"{cluster.name}: {cluster.nodes} x {cluster.machine.devices} {cluster.device.name}; "
        f"{result.found.considered} legal plans, {result.found.fitting} fit\n"
        f"Predicted from {result.basis}" + (f"; {result.track_record}" if result.track_record else ""),
        title + text.plans([*written, *found], rate=rate),
    ]


def _screen(result: Planned, confidence: Confidence, shown: int) -> list[str]:
    """What fits on a screen: the plans, how sure they are, and what would help."""
    from shoal.planner.explain import text

    best, limit = result.found.best[0], result.predictor.cluster.device.memory_bytes
    advice = ["What would help most: " + text.helps(result.changes, best, most=FEW_HELPS).replace("\n", "; ")]
    advice += [] if result.codings is None else [f"Codecs of gradients: {result.codings.verdict}"]
    return [
        *_head(result, shown),
        text.confidence(best, limit, time=confidence.time, memory=confidence.memory),
        "\n".join(
            [*advice, "--all shows the rest: time and memory item by item, every change that was tried, the cost."]
        ),
    ]


def _whole(result: Planned, confidence: Confidence, shown: int) -> list[str]:
    """Everything that was found out."""
    from shoal.planner.explain import text

    best, limit = result.found.best[0], result.predictor.cluster.device.memory_bytes
    rate = "tokens/s" if result.predictor.workload.sequence > 1 else "samples/s"
    return [
        *_head(result, shown),
        "Best plan: " + best.plan.describe(),
        text.bill(best.bill),
        text.memory(best.peak, limit),
        text.confidence(best, limit, time=confidence.time, memory=confidence.memory),
        text.changes(result.changes, best),
        "What would help most:\n" + text.helps(result.changes, best),
        *([] if result.codings is None else [result.codings.text()]),
        "No plan is both faster and smaller than these:\n" + text.plans(result.found.front[:10], rate=rate),
        text.money(result.money),
    ]


def _asked_for(result: Planned, scaled: Scaled | None) -> list[str]:
    """What an option of its own asks for."""
    from shoal.planner.explain import text

    parts = []
    if scaled is not None:
        parts.append("The fastest plans on other numbers of devices:\n" + text.choices(scaled.curve))
        parts.append("Nothing beats these in time, memory and money at once:\n" + text.choices(scaled.front))
    return parts + [each for each in (result.untraced, result.why_not) if each]


def _as_json(result: Planned, confidence: Confidence, scaled: Scaled | None) -> dict[str, Any]:
    from shoal.planner.explain.residuals import confidence_record
    from shoal.planner.explain.text import help_sentence

    found, cluster, best = result.found, result.predictor.cluster, result.found.best[0]
    limit = cluster.device.memory_bytes
    return {
        "cluster": {"name": cluster.name, "nodes": cluster.nodes, "devices": cluster.devices},
        "considered": found.considered,
        "fitting": found.fitting,
        "plans": [one.record() for one in found.best],
        "front": [one.record() for one in found.front],
        "written": result.written.record() if result.written else None,
        "changes": [
            {
                "what": c.what,
                "step_s": c.step_s,
                "memory_bytes": c.memory_bytes,
                "fits": c.fits,
                "sentence": help_sentence(c, best),
                "caveat": c.caveat,
            }
            for c in result.changes
        ],
        "codecs": None if result.codings is None else result.codings.record(),
        "confidence": confidence_record(best, limit, time=confidence.time, memory=confidence.memory),
        "scaling": None if scaled is None else [one.record() for one in scaled.curve],
        "front_of_devices": None if scaled is None else [one.record() for one in scaled.front],
        "untraced": result.untraced,
        "why_not": result.why_not,
        "money": result.money,
        "basis": result.basis,
        "evidence": result.evidence,
        "track_record": result.track_record,
        "constants": result.predictor.constants.record(),
    }


# `shoal split`.


def split(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file with a module of your own.")],
    overrides: Overrides = None,
    stages: Annotated[int, typer.Option("--stages", min=2, help="Stages to cut the chain into.")] = 2,
    yes: Annotated[bool, typer.Option("--yes", help="Write the keys into the run file without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Proposes how to split a module that declares nothing over tensor and pipeline, and writes it into the run file.

    Example: shoal split recipes/vit.toml --yes
    """
    from shoal.runfile.load import load_run

    loaded = load_run(run_file, overrides or ())  # a wrong file is refused before what follows imports torch
    from shoal.planning.split_proposal import propose, write_keys

    with busy("reading the module"):
        proposal = propose(loaded, stages=stages)
    if as_json:
        answer(json.dumps(proposal.to_json()))
    else:
        print("\n".join(proposal.lines()))
    if not proposal.keys():
        return
    asked = not as_json and sys.stdin.isatty()
    if yes or (asked and typer.confirm(f"\nWrite this into [model] of {run_file}?", default=False)):
        write_keys(run_file, proposal)
        if not as_json:
            print(f"written; prove it: shoal verify {run_file} layout.tensor=2")
    elif not as_json and not asked:
        print(f"\n--yes writes this into [model] of {run_file}")
