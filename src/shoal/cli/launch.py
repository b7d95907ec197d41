"""`shoal launch`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

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
        Path | None, typer.Option("--directory", metavar="DIR", help="Holds logs/; default runs/<script>.")
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
    environ = job_environ(os.environ, host, logs)
    if order == "measured" and host.nodes > 1:
        from shoal.launcher.host_order import along_the_ring

        host = along_the_ring(host, environ)
    raise typer.Exit(run_host(command, host, directory=logs, environ=environ))


def _there_is(module: str) -> bool:
    """Whether the module's outermost package, which is imported by nobody yet, is there or in the current folder."""
    outermost = module.partition(".")[0]
    path = [os.getcwd(), *sys.path]
    return outermost in sys.builtin_module_names or PathFinder.find_spec(outermost, path) is not None
