"""`shoal watch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def watch(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories, running or not; several are compared.")
    ],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 0,
    token: Annotated[str | None, typer.Option(help="The token that opens the page; default: a random one.")] = None,
    open_to_all: Annotated[bool, typer.Option("--no-token", help="Whoever reaches the port may look.")] = False,
) -> None:
    """Serves a live page of one or several runs until Ctrl-C.

    Example: shoal watch runs/stdlib-gpt
    """
    import secrets

    from shoal.page.live_run import LiveRun
    from shoal.page.server import listen, serve

    runs = [LiveRun(directory) for directory in directories]
    listener = listen(host, port)
    secret = None if open_to_all else token or secrets.token_urlsafe(24)
    shown = f"[{host}]" if ":" in host else host
    query = "" if secret is None else f"?token={secret}"
    try:
        print(f"http://{shown}:{listener.getsockname()[1]}/{query}", flush=True)
        serve(runs, listener, token=secret)
    except KeyboardInterrupt:
        print("The page is closed; the runs go on without it", file=sys.stderr)
