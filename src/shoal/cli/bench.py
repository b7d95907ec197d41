"""`shoal bench`: figures beside a peer's, measured in one run.

A verb is a line in `MODULES`: its name, and the module whose function of that name is the command. The module is
imported when the verb is called, or when `shoal bench --help` asks for its first sentence.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.main import get_command

from shoal.cli.arguments import Verbs

MODULES = {
    "step": "shoal.bench.step",
    "comm": "shoal.bench.comm",
    "link": "shoal.bench.link",
    "sync": "shoal.bench.sync",
    "products": "shoal.bench.products",
    "codec": "shoal.bench.codec",
}


class Benchmarks(Verbs):
    """A group of commands that are imported one by one, when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs, in the order of `MODULES`."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb's command; None where there is no such verb."""
        if cmd_name not in MODULES:
            return None
        verb = typer.Typer(rich_markup_mode=None, add_completion=False)
        verb.command(cmd_name)(getattr(importlib.import_module(MODULES[cmd_name]), cmd_name))
        return get_command(verb)


app = typer.Typer(
    cls=Benchmarks,
    help="Benchmarks, each beside a peer in one run. A check that does not hold is reported, and changes no exit code.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def bench() -> None:
    """Keeps the group a group: it has no commands of typer's own."""
