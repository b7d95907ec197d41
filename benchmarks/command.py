"""Running a benchmark's function as a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from shoal.errors import ShoalError


def run(command: Callable[..., Any]) -> None:
    """Runs `command` with the options of this process's command line. Shoal's own errors become one sentence."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except ShoalError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
