"""How many replicas an elastic run starts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.assembly.start import processes_of
from shoal.runfile.elastic_rules import elastic_refusal
from shoal.runfile.load import load_run

RECIPE = Path(__file__).parents[2] / "recipes/stdlib-gpt.toml"


@pytest.mark.parametrize(
    ("keys", "started"),
    [
        (["elastic.max=3"], 3),
        (["elastic.max=3", "run.processes=2"], 2),
        (["elastic.max=3", "layout.tensor=2", "run.processes=4"], 4),
    ],
)
def test_a_run_starts_with_the_processes_that_it_names(keys: list[str], started: int) -> None:
    """Two of three replicas, of one rank or of two; all of them where no number is given."""
    run_file = load_run(RECIPE, keys)
    assert elastic_refusal(run_file) is None
    assert processes_of(run_file, {}) == started


@pytest.mark.parametrize(
    "keys",
    [
        ["elastic.max=3", "run.processes=4"],
        ["elastic.min=2", "elastic.max=3", "run.processes=1"],
        ["elastic.max=3", "layout.tensor=2", "run.processes=3"],
    ],
)
def test_fewer_than_min_more_than_max_and_parts_of_replicas_are_refused(keys: list[str]) -> None:
    """The sentence names all three keys."""
    with pytest.raises(Exception, match=r"run\.processes = \d with elastic\.min = \d and elastic\.max = 3"):
        load_run(RECIPE, keys)
