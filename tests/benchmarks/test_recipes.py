"""The figures that recipes state in their heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.recipes import BASES, figures
from recipes.models.dates import LEFT_OUT, Dates

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(figures()))
def test_a_figure_is_of_a_measurement_of_the_recipe(name: str) -> None:
    """Accuracies are reached from below, losses from above; each run file is in the documentation."""
    measurement, relation, bound = figures()[name]
    assert (measurement, relation) in {("accuracy/eval", ">="), ("loss/eval", "<=")}
    assert bound > 0
    assert f"recipes/{name}.toml" in (ROOT / "docs/recipes.md").read_text()


def test_every_figure_in_a_head_is_read() -> None:
    """No head says "Figure" in a way that the benchmark passes over, and bases are recipes."""
    said = {file.stem for file in (ROOT / "recipes").glob("*.toml") if "# Figure" in file.read_text()}
    assert said == set(figures())
    assert said
    assert all((ROOT / f"recipes/{base}.toml").exists() for base in BASES.values())


def test_the_answer_to_a_date_counts_alone() -> None:
    """The targets that count spell the date of the question, in numbers."""
    for i in range(20):
        tokens, targets = Dates(20, 0)[i]
        assert tokens.shape == targets.shape
        day, month, year, _, *_ = bytes(tokens.tolist()).decode().split()
        answer = bytes(targets[targets != LEFT_OUT].tolist()).decode()
        assert answer.startswith(f"{year}-")
        assert answer.endswith(f"-{int(day):02}\n")
        assert len(answer) == len("1987-03-05\n")
        counted = torch.nonzero(targets != LEFT_OUT)[0, 0]
        assert bytes(tokens[: counted + 1].tolist()).decode().endswith(f"{month} {year} = ")
