"""Every benchmark of the folder is a program of its own."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "    run(" in path.read_text())


def test_the_folder_has_the_benchmarks_of_the_makefile() -> None:
    """And nothing that users run."""
    assert {"zero", "memory", "pipeline", "noise", "check", "wire", "programs", "plan", "simulate"} <= set(COMMANDS)
    assert not {"comm", "step", "link", "products"} & set(COMMANDS)


def app_of(command: Callable[..., None]) -> typer.Typer:
    """The program of a benchmark."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    return app


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_shows_an_example(name: str) -> None:
    """Its command is the function of the module's name."""
    app = app_of(getattr(importlib.import_module(f"benchmarks.{name}"), name))
    shown = CliRunner().invoke(app, ["--help"], catch_exceptions=False)
    assert f"Example: python -m benchmarks.{name}" in shown.stdout


@pytest.mark.stress
def test_a_benchmark_starts_its_own_ranks() -> None:
    """`python -m benchmarks.checkpoint` from the repository: one JSON object with the row of its two ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", "--saves", "2", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (row,) = report["rows"]
    assert (report["bench"], row["ranks"], row["saves"]) == ("checkpoint", 2, 2)
    assert len(report["checks"]) == 1


@pytest.mark.slow
def test_a_wrong_option_is_refused_in_a_sentence() -> None:
    """Shoal's own errors reach the terminal without a traceback, with their exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.layouts", "nowhere.toml"], cwd=ROOT, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nowhere.toml" in done.stderr
    assert "Traceback" not in done.stderr
