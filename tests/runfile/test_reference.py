"""The written reference is what the tables say."""

from __future__ import annotations

from pathlib import Path

import shoal
from shoal.config.load import dumps, load
from shoal.runfile.combinations import combinations
from shoal.runfile.load import load_run, reference
from shoal.runfile.run_file import RunFile

ROOT = Path(shoal.__file__).parents[2]


def test_the_reference_of_the_run_file_is_current() -> None:
    """docs/reference/run-file.md is what the tables generate; `python -m shoal.runfile.load FILE` writes it."""
    assert (ROOT / "docs/reference/run-file.md").read_text(encoding="utf-8") == reference()


def test_the_page_of_combinations_is_current() -> None:
    """docs/reference/combinations.md is what the rules say; `python -m shoal.runfile.combinations FILE` writes it."""
    assert (ROOT / "docs/reference/combinations.md").read_text(encoding="utf-8") == combinations()


def test_the_recipes_load_and_load_again_from_their_resolved_form(tmp_path: Path) -> None:
    """Every file in recipes/ is legal, and its resolved copy is the same run."""
    files = sorted((ROOT / "recipes").glob("*.toml"))
    assert files
    for file in files:
        run_file = load_run(file)
        (tmp_path / file.name).write_text(dumps(run_file))
        assert load(RunFile, tmp_path / file.name) == run_file
