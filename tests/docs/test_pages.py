"""The pages of the documentation: every one is in the site, links lead somewhere, and examples work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shoal.config.load import apply
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile
from tests.cli.warm_scripts import run_script

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in ("decisions", "benchmarks", "_build") and path.stem != "command-line"
)
WITH_EXAMPLES = ["first-ten-minutes", "your-model", "precision", "memory-trouble", "when-it-hangs"]
LEAST: dict[str, Any] = {
    "run": {"name": "example", "steps": 2},
    "model": {"kind": "gpt", "vocabulary": 256, "width": 32, "layers": 2, "heads": 2},
    "data": {"kind": "stdlib"},
    "batch": {"global_samples": 16, "sequence": 32},
}


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_every_page_is_in_the_navigation() -> None:
    named: set[Path] = set()
    for page in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
            named |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    assert {page.resolve() for page in PAGES} - {DOCS / "index.md"} == named - {DOCS / "reference/command-line.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    """Those to files; those to the web are not tried."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text)
    lost = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not lost


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_tables_are_accepted(page: str) -> None:
    """Each example is a run file, or tables that may stand in one."""
    tables = blocks(page, "toml")
    assert tables
    for text in tables:
        given = tomllib.loads(text)
        merged = {**LEAST, **{name: {**LEAST.get(name, {}), **table} for name, table in given.items()}}
        if given.get("model", {}).get("kind") == "python":
            merged["model"] = given["model"]
        run_file_of(apply(merged, [], RunFile), file=page)


def test_the_script_of_your_model_trains(tmp_path: Path) -> None:
    """On two ranks."""
    (script,) = blocks("your-model", "python")
    (tmp_path / "mine.py").write_text(script)
    codes = run_script(tmp_path / "mine.py", tmp_path, world=2)
    assert codes == [0, 0], (tmp_path / "rank-0.txt").read_text()
    assert (tmp_path / "runs/mine/checkpoints/step-00000008/manifest.json").exists()


def test_the_support_matrix_names_tests_that_are_there() -> None:
    text = (DOCS / "support-matrix.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert named
    assert [name for name in named if not (DOCS.parent / name).exists()] == []
