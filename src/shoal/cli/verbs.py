"""The list of verbs that `--help` shows."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Verbs(TyperGroup):
    """A list of verbs with their whole first paragraph, which click would cut at 45 characters."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list; called for `--help`."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        texts = {name: (verb.help or "").partition("\n\n")[0] for name, verb in verbs if verb and not verb.hidden}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])
