"""`shoal watch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.page.over_ssh import Remote


def watch(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN_DIR...",
            help="Run directories, running or not; several are compared. HOST:RUN_DIR is one of another host, by ssh; "
            "HOST: the newest there.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 0,
    token: Annotated[str | None, typer.Option(help="The token that opens the page; default: a random one.")] = None,
    open_to_all: Annotated[bool, typer.Option("--no-token", help="Whoever reaches the port may look.")] = False,
    ssh: Annotated[
        str | None, typer.Option("--ssh", metavar="COMMAND", help="HOST:RUN_DIR: the ssh, with its options.")
    ] = None,
    python: Annotated[str, typer.Option("--python", help="HOST:RUN_DIR: the interpreter there.")] = "python3",
    newest: Annotated[bool, typer.Option("--newest", help="The newest run in runs/.")] = False,
    with_input: Annotated[bool, typer.Option("--with-input", help="End when standard input does.")] = False,
) -> None:
    """Serves a live page of one or several runs until Ctrl-C; by ssh of a run on another host.

    Example: shoal watch runs/stdlib-gpt
    """
    from shoal.errors import UsageError
    from shoal.page.over_ssh import newest_run, remote_of

    named = [*(directories or ()), *([str(newest_run())] if newest else [])]
    if not named:
        raise UsageError("no run is named: give its directory, such as runs/NAME, or --newest")
    remotes = [remote_of(one) for one in named]
    if remotes[0] is not None:
        if len(remotes) > 1:
            raise UsageError("runs of another host are shown one at a time: name one HOST:RUN_DIR")
        _watch_there(remotes[0], ssh=ssh, python=python, port=port)
    else:
        _watch_here([Path(one) for one in named], host, port, None if open_to_all else token or "", with_input)


def _watch_here(directories: list[Path], host: str, port: int, token: str | None, with_input: bool) -> None:
    import secrets

    from shoal.errors import UsageError
    from shoal.federated.page import PAGE, REPORT
    from shoal.page.live_run import LiveRun
    from shoal.page.server import listen, serve

    for directory in directories:
        if (directory / REPORT).is_file():
            raise UsageError(f"{directory} is a federated run, which has no live page: open {directory / PAGE}")
    runs = [LiveRun(directory) for directory in directories]
    listener = listen(host, port)
    secret = None if token is None else token or secrets.token_urlsafe(24)
    shown = f"[{host}]" if ":" in host else host
    query = "" if secret is None else f"?token={secret}"
    if with_input:
        _end_with_input()
    try:
        print(f"http://{shown}:{listener.getsockname()[1]}/{query}", flush=True)
        serve(runs, listener, token=secret)
    except KeyboardInterrupt:
        print("The page is closed; the runs go on without it", file=sys.stderr)


def _watch_there(remote: Remote, *, ssh: str | None, python: str, port: int) -> None:
    import threading

    from shoal.page.over_ssh import SSH, forwarded

    try:
        with forwarded(remote, ssh=ssh or SSH, python=python, port=port) as address:
            print(address, flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print("The page is closed; the run goes on without it", file=sys.stderr)


def _end_with_input() -> None:
    import os
    import signal
    import threading

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
