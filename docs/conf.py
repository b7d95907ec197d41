"""The documentation site: `make docs`. Pages are Markdown (MyST); command line and Python API come from the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

project = "Shoal"
html_title = "Shoal"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "decisions/*", "benchmarks/*", "grafana/*"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages; tests/docs checks them
nitpicky = False

HERE = Path(__file__).parent


def command_line() -> str:
    """Every verb with its help and options, in Markdown."""
    import typer.main
    from typer.core import TyperGroup

    from shoal.cli.main import app

    lines = ["# Command line", "", "Written from the program itself: `shoal VERB --help` says the same."]

    def describe(name: str, command: Any, depth: int) -> None:
        lines.extend(
            ["", f"{'#' * depth} {name}", "", "```text", (command.help or "").strip().replace("\b", ""), "```"]
        )
        options = [p for p in command.params if getattr(p, "help", None) and not getattr(p, "hidden", False)]
        if options:
            lines.extend(["", "| argument or option | |", "|---|---|"])
        for parameter in options:
            names = ", ".join(f"`{option}`" for option in parameter.opts) or f"`{parameter.name}`"
            text = " ".join(parameter.help.split()).replace("|", "\\|")
            lines.append(f"| {names} | {text} |")
        if isinstance(command, TyperGroup):
            for child, inner in sorted(command.commands.items()):
                describe(f"{name} {child}", inner, depth + 1)

    root = typer.main.get_command(app)
    for verb, command in sorted(root.commands.items()):  # type: ignore[attr-defined]
        describe(f"shoal {verb}", command, 2)
    return "\n".join(lines) + "\n"


def setup(app: Any) -> None:
    """Called by Sphinx: the page of the command line is written before the pages are read."""
    app.connect("builder-inited", lambda _: (HERE / "reference" / "command-line.md").write_text(command_line()))
