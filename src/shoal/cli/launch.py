"""`shoal launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import coordination, output_folder

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the script belongs to it."""


def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="The script, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its own arguments.")] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", "-n", min=1, help="Ranks on this host; default: one per GPU, else one."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    order: Annotated[
        str, typer.Option("--order", help="given; or measured: hosts are numbered along the best ring of their links.")
    ] = "given",
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="Holds logs/; default runs/<script>.", callback=output_folder),
    ] = None,
    fewest: Annotated[
        int | None,
        typer.Option("--min", min=1, help="Of a script with hvd.elastic: replace lost ranks, and go on with so many."),
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", metavar="HOST:PORT", help="Of several hosts, with hvd.elastic.")
    ] = None,
    token: Annotated[Path | None, typer.Option("--token", metavar="FILE", help="The job's token.")] = None,
    authorities: Annotated[
        Path | None, typer.Option("--authorities", metavar="PEM", help="Who may vouch for the coordinator (TLS).")
    ] = None,
) -> None:
    """Starts the ranks of a script on this host; on each of several hosts under srun, Kubernetes or Ray.

    Example: shoal launch -n 2 my_training.py --epochs 3
    """
    from shoal.errors import UsageError
    from shoal.files import meant
    from shoal.launcher.host import host_from, job_environ, run_host
    from shoal.launcher.script import RANK

    if not module and not Path(script).is_file():
        raise UsageError(
            f"there is no file {script}{meant(Path(script))}: shoal launch takes a Python script, or with -m a module"
        )
    if not module and script.endswith(".toml"):
        raise UsageError(f"{script} is no Python script: a run file is trained by shoal train {script}")
    if module and not _there_is(script):
        raise UsageError(f"there is no module {script}: call shoal launch where it lies, or set PYTHONPATH")
    target = ["-m", script] if module else [script]
    command = [*RANK, *target, *(arguments or ())]
    host = host_from(os.environ, ranks=ranks_per_node)
    logs = directory or Path("runs") / (script if module else Path(script).stem)
    if order not in ("given", "measured"):
        raise UsageError(f"--order {order}: it is given or measured")
    elsewhere = coordination(coordinator, token, authorities, host.ranks if coordinator else None)
    if fewest is not None or coordinator is not None:
        raise typer.Exit(_elastic(command, host.ranks, fewest=fewest, directory=logs, environ=os.environ | elsewhere))
    environ = job_environ(os.environ, host, logs)
    if order == "measured" and host.nodes > 1:
        from shoal.launcher.host_order import along_the_ring

        host = along_the_ring(host, environ)
    raise typer.Exit(run_host(command, host, directory=logs, environ=environ))


COMMIT_S = 3600.0
"""How long ranks that train may take until a commit lets a newcomer in."""
SILENCE_S = 30.0
"""Without a heartbeat. The launcher sees a process end; on a host that is full, threads of scripts come late."""


def _elastic(
    command: Sequence[str], ranks: int, *, fewest: int | None, directory: Path, environ: Mapping[str, str]
) -> int:
    """Starts `ranks` on this host, and others for those that are lost; the exit code."""
    from shoal.errors import UsageError
    from shoal.fleet.launch import ElasticJob, run_elastic
    from shoal.resilience.config import ElasticConfig

    if fewest is not None and fewest > ranks:
        raise UsageError(f"--min {fewest} with {ranks} ranks: lower --min, or start more (-n)")
    config = ElasticConfig(min=fewest or 1, max=ranks, silence_s=SILENCE_S, accept_s=COMMIT_S, wait_s=2 * COMMIT_S)
    job = ElasticJob(command, 1, None, directory)
    code, _ = run_elastic(job, config, environ=environ)
    return code


def _there_is(module: str) -> bool:
    """Whether the module's outermost package, which is imported by nobody yet, is there or in the current folder."""
    outermost = module.partition(".")[0]
    path = [os.getcwd(), *sys.path]
    return outermost in sys.builtin_module_names or PathFinder.find_spec(outermost, path) is not None
