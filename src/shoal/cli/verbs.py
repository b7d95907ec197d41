"""The list of verbs that `--help` shows."""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup


class Verbs(TyperGroup):
    """A list of verbs with their whole first paragraph, which click would cut at 45 characters.

    Ctrl-C in a verb that has no other answer to it ends the verb with a sentence, and the code of the signal.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb that the command line names."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            verb = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
            print(f"{verb}: interrupted before its end; the same command starts it again", file=sys.stderr)
            raise typer.Exit(128 + signal.SIGINT) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list; called for `--help`."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        texts = {name: (verb.help or "").partition("\n\n")[0] for name, verb in verbs if verb and not verb.hidden}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])
