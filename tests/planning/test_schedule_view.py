"""`shoal simulate --schedule`: the table that the pipeline would run, as text, picture and JSON."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.assembly.splitting import microbatching
from shoal.cli.simulate import simulate
from shoal.runfile.load import load_run

ROOT = Path(__file__).parents[2]
GPT = str(ROOT / "recipes" / "stdlib-gpt.toml")
FOUR = ("layout.pipeline=4", "pipeline.microbatches=8")
OWN = """
[run]
name = "own"
steps = 1
[model]
kind = "python"
build = "nowhere:model"
[data]
kind = "digits"
[batch]
global_samples = 16
"""


def invoked(*arguments: str):
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, list(arguments))


def test_the_text_is_the_textbooks_picture_and_the_simulated_idle_shares() -> None:
    """GPipe on 4 ranks x 8 microbatches: idle (P - 1) / (M + P - 1), all activations stored."""
    result = invoked(GPT, *FOUR, "pipeline.schedule='GPipe'", "--schedule")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "GPipe: 4 ranks, 8 microbatches"
    assert "mean 27.3%" in lines[5]
    assert lines[5].endswith("at most: 8 8 8 8")
    assert lines[6].startswith("simulated: ")


def test_every_action_has_its_time_and_no_rank_does_two_things_at_once() -> None:
    """The JSON holds the rows of the table, in order, without overlap, up to the makespan."""
    result = invoked(GPT, *FOUR, "layout.replicate=2", "--schedule", "--json")
    view = json.loads(result.stdout)
    assert (view["unit"], view["in_flight"]) == ("seconds", [4, 3, 2, 1])
    for row in view["rows"]:
        assert sorted(a["microbatch"] for a in row if a["kind"] == "F") == list(range(8))
        assert all(a["end"] <= b["start"] for a, b in pairwise(row))
    assert max(row[-1]["end"] for row in view["rows"]) == view["makespan"]


def test_a_users_own_model_is_shown_in_equal_parts(tmp_path: Path) -> None:
    """Its sizes are not known, so that seconds would be invented."""
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    view = json.loads(invoked(str(path), *FOUR, "--schedule", "--json").stdout)
    assert (view["unit"], view["makespan"]) == ("parts", 24 + 3 * 3)


def shown(*overrides: str) -> dict[str, Any]:
    result = invoked(GPT, *overrides, "--schedule", "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_what_has_no_price_is_shown_in_equal_parts() -> None:
    """A model that lies in blocks on a grid goes through the same schedule."""
    view = shown("layout.pipeline=2", "layout.tensor=4", "layout.tensor_grid=[2,2]")
    assert (view["unit"], view["microbatches"], view["makespan"]) == ("parts", 4, 3 * 4 + 3 * 1)


@pytest.mark.parametrize(
    ("number", "overrides"),
    [
        (3, ("pipeline.schedule='PipeDream'", "batch.micro_samples=3")),
        (2, ("pipeline.schedule='PipeDream'", "layout.replicate=2", "batch.micro_samples=3")),
        (3, ("pipeline.schedule='PipeDream'", "batch.global_samples=3")),
        (6, ("pipeline.microbatches=6", "batch.micro_samples=3")),
    ],
    ids=str,
)
def test_as_many_microbatches_are_shown_as_run_together(number: int, overrides: tuple[str, ...]) -> None:
    """Those that a rank would make of the same run file."""
    overrides = ("layout.pipeline=2", "batch.global_samples=8", *overrides)
    run_file = load_run(Path(GPT), (*overrides, "model.tied=false"))
    layout = run_file.layout.layout(run_file.layout.default_processes or 1)
    assert shown(*overrides, "model.tied=false")["microbatches"] == number
    assert microbatching(run_file, layout).in_flight == number


@pytest.mark.slow
def test_the_picture_is_written_and_other_formats_are_refused(tmp_path: Path) -> None:
    """By the suffix."""
    path = tmp_path / "schedule.svg"
    assert invoked(GPT, *FOUR, "--picture", str(path)).exit_code == 0
    assert "<svg" in path.read_text()
    refused = invoked(GPT, *FOUR, "--picture", str(tmp_path / "schedule.txt"))
    assert (refused.exit_code, ".png, .svg, .pdf" in refused.output) == (2, True)


def test_without_a_pipeline_there_is_nothing_to_show() -> None:
    """One sentence."""
    assert "layout.pipeline=4" in str(invoked(GPT, "--schedule").exception)
