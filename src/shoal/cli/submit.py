"""`shoal submit`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shoal.cli.arguments import AsJson, ScriptOverrides, Verbs
from shoal.observe.busy import busy
from shoal.standard_output import answer

if TYPE_CHECKING:
    from shoal.submit.scheduler import Scheduler, Submission, To

JOB = "job"
RUN_DIRECTORY = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a submitted run.")]


class WithDefault(Verbs):
    """Commands, of which `job` is meant where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called with what follows `shoal submit`."""
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [JOB, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=WithDefault, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def submit() -> None:
    """Writes a run's job for Slurm, Kubernetes or Ray, and sends it; status, logs, cancel.

    Example: shoal submit RUN.toml --to slurm --nodes 2 --gpus 8 --time 12:00:00 --dry-run
    """


@app.command(JOB)
def job(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.toml|SCRIPT.py", help="The run file, a script; a sweep file for Slurm.")
    ],
    overrides: ScriptOverrides = None,
    to: Annotated[Literal["slurm", "kubernetes", "ray"] | None, typer.Option("--to", help="The scheduler.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job files; write and send nothing.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the job files beside the run; send nothing.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show what the job prints until it ends; exit 1 where it fails.")
    ] = False,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Hosts; default one.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", min=1, help="Ranks on each host; default: as many as GPUs.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs of each host.")] = 0,
    cpus: Annotated[int | None, typer.Option("--cpus", min=1, help="Cores of each rank; default one.")] = None,
    memory: Annotated[int | None, typer.Option("--memory", min=1, metavar="GIB", help="Memory of each host.")] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="MINUTES|D-HH:MM:SS", help="Limit of one start.")
    ] = None,
    save_before: Annotated[
        int, typer.Option("--save-before", min=1, metavar="S", help="Seconds before the limit in which ranks save.")
    ] = 120,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="How often the job starts again.")] = 100,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="C.toml",
            help="Take hosts, GPUs, cores and memory from the plan on it; refuse what cannot fit.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME[=VALUE]", help="A variable for every rank; repeatable.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm: partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm: account.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Slurm: quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", help="Slurm: features of the hosts.")] = None,
    image: Annotated[str | None, typer.Option("--image", help="Kubernetes: container image.")] = None,
    volume: Annotated[
        str | None, typer.Option("--volume", help="Kubernetes: claim that holds run directories.")
    ] = None,
    kind: Annotated[Literal["jobset", "trainjob"], typer.Option("--kind", help="Kubernetes: object.")] = "jobset",
    namespace: Annotated[str, typer.Option("--namespace", help="Kubernetes: namespace.")] = "default",
    queue: Annotated[str | None, typer.Option("--queue", help="Kubernetes: Kueue's queue; all pods or none.")] = None,
    secret: Annotated[str | None, typer.Option("--secret", help="Kubernetes: Secret with --env's secrets.")] = None,
    spot: Annotated[
        list[str] | None, typer.Option("--spot", metavar="TAINT[=VALUE]", help="Kubernetes: a taint to tolerate.")
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option("--node-selector", metavar="NAME=VALUE", help="Kubernetes: a label that hosts must have."),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option("--workdir", metavar="DIR", help="Kubernetes: where pods start, with your modules and data."),
    ] = None,
    address: Annotated[str, typer.Option("--address", help="Ray: address of the cluster.")] = "auto",
    dashboard: Annotated[
        str | None,
        typer.Option(
            "--dashboard",
            metavar="http://HOST:8265",
            help="Ray: submit by its job API, with this folder; the driver runs in the cluster.",
        ),
    ] = None,
    py_module: Annotated[
        list[Path] | None,
        typer.Option(
            "--py-module", metavar="DIR", help="Ray, with --dashboard: a package that goes along; repeatable."
        ),
    ] = None,
    strategy: Annotated[
        Literal["STRICT_SPREAD", "PACK"], typer.Option("--strategy", help="Ray: how hosts are placed.")
    ] = "STRICT_SPREAD",
    wait: Annotated[float, typer.Option("--wait", min=1, metavar="S", help="Ray: longest wait for room.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Writes the job files beside the run and submits them; `shoal submit RUN.toml` is short for it. A script that
    calls shoal.train or shoal.start is submitted like a run file.

    Example: shoal submit RUN.toml --to slurm --nodes 2 --gpus 8 --time 12:00:00
    """
    from dataclasses import replace

    from shoal.cli.arguments import command_of_script
    from shoal.errors import UsageError
    from shoal.experiments.search import load_sweep
    from shoal.experiments.trial_command import independent_trials, is_sweep
    from shoal.runfile.load import load_run
    from shoal.submit.job import (
        DEFAULT_CPUS,
        Array,
        Resources,
        array_job,
        divide,
        job_of,
        seconds_of,
        split_variables,
        world_size_of,
    )
    from shoal.submit.kubernetes import Kubernetes
    from shoal.submit.pods import KubernetesOptions, node_selector_of
    from shoal.submit.ray import Ray, RayJobs
    from shoal.submit.scheduler import write_files, write_record
    from shoal.submit.slurm import Slurm, SlurmOptions

    if to is None:
        raise UsageError("shoal submit does not know where to: give --to slurm, --to kubernetes or --to ray")
    script = command_of_script(run_file, overrides or ())
    sweep = load_sweep(run_file) if script is None and is_sweep(run_file) else None
    if sweep is not None and to != "slurm":
        raise UsageError(f"a sweep goes to Slurm as one array, not to {to}: for Ray, shoal sweep {run_file} --via ray")
    if script is not None:
        loaded = script.run_file
    else:
        loaded = load_run(run_file if sweep is None else run_file.parent / sweep.run, overrides or ())
    wanted = ranks_per_node or gpus or None
    world_size = world_size_of(loaded, nodes=nodes, ranks_per_node=wanted)
    if cluster is not None:
        from shoal.planning.job_request import job_request  # imports torch

        planned = job_request(loaded, cluster, world_size=world_size)
        nodes, wanted = nodes or planned.nodes, wanted or planned.ranks_per_node
        gpus, memory = gpus or planned.gpus_per_node, memory or planned.memory_gib
        cpus = cpus or planned.cpus_per_rank
    hosts, each = divide(world_size, nodes=nodes, ranks_per_node=wanted)
    limit_s = None if time is None else seconds_of(time)
    resources = Resources(hosts, each, gpus, cpus or DEFAULT_CPUS, memory, limit_s, save_before)
    variables, secrets = split_variables(env or (), os.environ)
    if script is not None:
        variables |= script.environ
    made = job_of(
        loaded,
        resources,
        file=str(run_file),
        folder=Path.cwd(),
        python=sys.executable,
        variables=variables,
        secrets=secrets,
        restarts=restarts,
    )
    if sweep is not None:
        array = Array(run_file.absolute(), len(independent_trials(sweep)), sweep.parallel)
        made = array_job(made, array, name=sweep.name, directory=str(Path("sweeps") / sweep.name))
    if script is not None:
        made = replace(made, script=(str(run_file), *script.arguments))
    pods = None
    if image and volume:
        labels = node_selector_of(node_selector or ())
        pods = KubernetesOptions(image, volume, namespace, queue, secret, tuple(spot or ()), workdir, labels)
    schedulers: dict[str, Scheduler] = {
        "slurm": Slurm(SlurmOptions(partition, account, qos, constraint)),
        "kubernetes": Kubernetes(pods, kind),
        "ray": Ray(address, strategy=strategy, wait_s=wait),
    }
    if dashboard is not None or py_module:
        if to != "ray" or dashboard is None:
            raise UsageError(
                "--dashboard and --py-module are of Ray's job API: give --to ray --dashboard http://HOST:8265"
            )
        schedulers["ray"] = RayJobs(dashboard, strategy=strategy, wait_s=wait, py_modules=py_module or ())
    scheduler = schedulers[to]
    files = scheduler.files(made)
    if dry_run:
        if as_json:
            answer(json.dumps({"files": dict(files)}))
        for name, text in files.items() if not as_json else ():
            print(f"# {made.job_files / name}\n{text}")
        return
    write_files(made, files)
    written = [os.path.relpath(made.job_files / name) for name in files]
    if write:
        answer(json.dumps({"files": written}) if as_json else "\n".join(written))
        return
    try:
        with busy(f"handing the job to {to}"):
            submission = scheduler.submit(made)
    except KeyboardInterrupt:
        print(
            f"shoal submit: interrupted while {to} was asked, which may have taken {made.name} or not: look there "
            "before you submit it again",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.SIGINT) from None
    write_record(made, submission)
    if as_json:
        answer(json.dumps({"to": to, "id": submission.identity, "directory": str(made.directory)}))
    else:
        print(f"{to} took {made.name} as {submission.identity}: shoal submit status {os.path.relpath(made.directory)}")
        print(f"Written: {', '.join(written)}")
    if follow:
        _follow(submission, scheduler, made.directory)


@app.command("status")
def status(directory: RUN_DIRECTORY, as_json: AsJson = False) -> None:
    """Says how the job of a submitted run stands.

    Example: shoal submit status runs/my-run
    """
    submission, scheduler = _submitted(directory)
    found = scheduler.status(submission)
    if as_json:
        answer(json.dumps({"id": submission.identity, "state": found.state, "sentence": found.sentence}))
    else:
        print(found.sentence)


@app.command("logs")
def logs(
    directory: RUN_DIRECTORY,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until interrupted.")] = False,
) -> None:
    """Shows what the job of a submitted run prints.

    Example: shoal submit logs runs/my-run --follow
    """
    submission, scheduler = _submitted(directory)
    command = scheduler.log_command(submission, directory)
    if not command:
        print(f"nothing yet: {scheduler.status(submission).sentence}")
        return
    raise typer.Exit(subprocess.call([*command, "-f"] if follow else command))


@app.command("cancel")
def cancel(directory: RUN_DIRECTORY) -> None:
    """Ends the job of a submitted run; its ranks save first.

    Example: shoal submit cancel runs/my-run
    """
    submission, scheduler = _submitted(directory)
    scheduler.cancel(submission)
    print(f"{submission.to} was asked to end {submission.identity}")


def _follow(submission: Submission, scheduler: Scheduler, directory: Path) -> None:
    from shoal.submit.scheduler import follow

    try:
        found = follow(scheduler, submission, directory, say=lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print(f"The job goes on: shoal submit logs {os.path.relpath(directory)} --follow", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT) from None
    print(found.sentence, file=sys.stderr)
    raise typer.Exit(0 if found.state == "done" else 1)


def _submitted(directory: Path) -> tuple[Submission, Scheduler]:
    from shoal.submit.kubernetes import Kubernetes
    from shoal.submit.ray import Ray, RayJobs
    from shoal.submit.scheduler import read_record
    from shoal.submit.slurm import Slurm

    submission = read_record(directory)
    if "dashboard" in submission.where:
        return submission, RayJobs(submission.where["dashboard"])
    schedulers: dict[To, type[Scheduler]] = {"slurm": Slurm, "kubernetes": Kubernetes, "ray": Ray}
    return submission, schedulers[submission.to]()
