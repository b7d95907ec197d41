"""The `shoal` command itself: its version, its list of verbs, and what importing the package costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import shoal
from shoal.cli.main import app


def help_of(*verb: str) -> str:
    """`shoal VERB --help`, its lines joined."""
    done = CliRunner().invoke(app, [*verb, "--help"])
    assert done.exit_code == 0
    return " ".join(done.output.split())


def test_the_version_is_that_of_the_package() -> None:
    """`shoal --version` and `shoal.__version__` are what the installed package says."""
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"shoal {shoal.__version__}\n")
    assert shoal.__version__ == importlib.metadata.version("shoal")


@pytest.mark.parametrize("verb", [(), ("bench",), ("checkpoint",)])
def test_help_shows_whole_descriptions(verb: tuple[str, ...]) -> None:
    """No description of a verb is cut short."""
    listed = help_of(*verb)
    assert "Commands:" in listed
    assert "..." not in listed.partition("Commands:")[2]


def test_the_package_imports_no_torch() -> None:
    """Neither the package, its exceptions nor the command's own modules."""
    script = "import sys, shoal, shoal.cli.main; shoal.RunFailed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
