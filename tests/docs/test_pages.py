"""The pages of the documentation: every one is in the site, links lead somewhere, and examples work."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click import Context
from typer.core import TyperGroup
from typer.main import get_command

import shoal
from shoal.checkpoint.weights import weights_of
from shoal.cli.main import app
from shoal.cli.submit import WithDefault
from shoal.config.load import apply
from shoal.optim.build import build_optimizer
from shoal.runfile.load import load_run, run_file_of
from shoal.runfile.run_file import RunFile
from tests.cli.project import project
from tests.cli.warm_scripts import run_script

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in ("decisions", "benchmarks", "_build") and path.stem != "command-line"
)
OF_OTHER_FILES = ("data", "experiments")
"""Pages whose tables are tried elsewhere: `tests/data/test_docs.py`, `tests/experiments`."""
LEAST: dict[str, Any] = {
    "run": {"name": "example", "steps": 2},
    "model": {"kind": "gpt", "vocabulary": 256, "width": 32, "layers": 2, "heads": 2},
    "data": {"kind": "stdlib"},
    "batch": {"global_samples": 16, "sequence": 32},
}


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def with_tables() -> list[str]:
    """The pages with run files in blocks of TOML, but the reference, which is generated."""
    names = [str(page.relative_to(DOCS).with_suffix("")) for page in PAGES]
    return [n for n in names if not n.startswith("reference/") and n not in OF_OTHER_FILES and blocks(n, "toml")]


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


@pytest.mark.parametrize("page", [*with_tables(), "../README"])
def test_tables_are_accepted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example is a run file, or tables that may stand in one; in a folder with the model that pages speak of."""
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256}
    (tmp_path / "models/my-llama").mkdir(parents=True)
    (tmp_path / "models/my-llama/config.json").write_text(json.dumps(llama))
    monkeypatch.chdir(tmp_path)
    for text in blocks(page, "toml"):
        given = tomllib.loads(text)
        merged = {**LEAST, **{name: {**LEAST.get(name, {}), **table} for name, table in given.items()}}
        for name in ("model", "data"):
            if given.get(name, {}).get("kind", LEAST[name]["kind"]) != LEAST[name]["kind"]:
                merged[name] = given[name]
        run_file_of(apply(merged, [], RunFile), file=page)


def test_the_loss_over_gathered_samples_runs() -> None:
    """The block of losses-and-tables.md, in one process."""
    (code,) = blocks("losses-and-tables", "python")
    names = {"shoal": shoal, "F": F, "outputs": {name: torch.randn(3, 4) for name in ("first", "second")}}
    exec(code, names)
    assert names["losses"].shape == (3,)


def test_the_optimizer_of_the_page_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of optimizers.md, by the table that names it."""
    (code,) = blocks("optimizers", "python")
    (tmp_path / "my_optimizer.py").write_text(f"import torch\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    (table,) = [text for text in blocks("optimizers", "toml") if "my_optimizer" in text]
    run_file = run_file_of(apply(LEAST | tomllib.loads(table), [], RunFile), file="optimizers")
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = build_optimizer(run_file.optimizer, [("w", parameter, True)], lr=0.1)
    parameter.grad = torch.full_like(parameter, 4.0)
    optimizer.step()
    assert torch.allclose(parameter.detach(), torch.tensor(1 - 0.1 * 0.1 - 0.1 * 0.4**0.5))


def test_every_page_with_python_is_run() -> None:
    """Here, or by the tests of its room."""
    with_python = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES if "```python" in page.read_text()}
    own = {"data", "own-loop", "your-model", "python-api", "losses-and-tables", "wire", "horovod", "federated"}
    own |= {"optimizers"}
    assert {name for name in with_python if not name.startswith("migration/")} == own


@pytest.mark.slow
def test_the_script_of_your_model_trains(tmp_path: Path) -> None:
    """On two ranks."""
    (script,) = blocks("your-model", "python")
    (tmp_path / "mine.py").write_text(script)
    codes = run_script(tmp_path / "mine.py", tmp_path, world=2)
    assert codes == [0, 0], (tmp_path / "rank-0.txt").read_text()
    assert (tmp_path / "runs/mine/checkpoints/step-00000008/manifest.json").exists()


@pytest.mark.slow
def test_the_script_of_the_python_api_ends_where_it_began(tmp_path: Path) -> None:
    """Two ranks train, and what follows the call runs once, in the process that started them, with their weights. The
    page's other script loads them.
    """
    own = project(tmp_path)
    script, loading = blocks("python-api", "python")
    (tmp_path / "mine.py").write_text(script)
    done = own.python("mine.py")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "first weight" in line] == [done.stdout.splitlines()[-1]]
    whole = weights_of(tmp_path / "runs/api")["0.weight"]
    assert done.stdout.endswith(f"now {float(whole[0, 0]):.4f}\n")
    shutil.copytree(DOCS.parent / "recipes", tmp_path / "recipes")
    (tmp_path / "loading.py").write_text(loading)
    done = own.python("loading.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{20 * 64 + 64 + 64 * 2 + 2} parameters")
    assert "s a step" in done.stdout


@pytest.mark.slow
def test_the_script_of_federated_training_learns(tmp_path: Path) -> None:
    """With the page's own training and evaluation, all clients in one process."""
    (script,) = blocks("federated", "python")
    (tmp_path / "owners.py").write_text(script)
    done = project(tmp_path).python("owners.py")
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"'accuracy': ([\d.]+)", done.stdout)[-1]) > 0.85
    assert (tmp_path / "runs/owners/model.safetensors").exists()


def test_every_decision_is_in_the_index() -> None:
    """Once, under the question that it answers; what is superseded says so in both places."""
    folder = DOCS / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| .*\? \| (?:~~)?\[\d+\]\(([^)]+)\)(.*) \|$", index, flags=re.MULTILINE))
    pages = sorted(folder.glob("0*.md"))
    assert sorted(rows) == [page.name for page in pages]
    gone = {page.name for page in pages if "Superseded by" in page.read_text(encoding="utf-8")}
    assert gone == {name for name, rest in rows.items() if "superseded by" in rest}


def commands(path: Path) -> list[list[str]]:
    """The words behind `shoal` in each command of a page's blocks of code."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks_of = re.findall(r"```([^\n]*)\n(.*?)```", text, flags=re.DOTALL)
    fenced = "\n".join(body for language, body in blocks_of if language in ("", "sh", "bash"))
    indented = "\n".join(re.findall(r"^    \S.*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE))
    lines = [line.strip() for line in (fenced + "\n" + indented).splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"shoal [a-z]", line)]
    return [words[1:] for words in found]


@cache
def every_verb() -> Any:
    return get_command(app)


def named_verb(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` call, and what they hand it."""
    command, rest = every_verb(), list(words)
    while isinstance(command, TyperGroup) and rest:
        below = command.get_command(Context(command), rest[0])
        if below is None and isinstance(command, WithDefault):
            below, rest = command.get_command(Context(command), "job"), ["job", *rest]
        assert below is not None, f"shoal {' '.join(words)}: there is no {rest[0]}"
        command, rest = below, rest[1:]
    return command, rest


PAGES_AND_README = [*PAGES, DOCS.parent / "README.md"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_AND_README, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_commands_have_the_verbs_options_and_files_that_they_name(page: Path) -> None:
    """Every `shoal ...` in a block of code is parsed, its recipe read, and its keys applied to it."""
    for words in commands(page):
        command, rest = named_verb(words)
        command.make_parser(Context(command, **command.context_settings)).parse_args(list(rest))
        recipe = next((word for word in rest if word.startswith("recipes/")), None)
        if recipe is not None and "sweeps" not in recipe:
            keys = [word for word in rest if re.match(r"[a-z]+(\.[a-z_]+)+=", word)]
            load_run(DOCS.parent / recipe, keys)


def test_commands_are_found() -> None:
    """Fenced and indented ones, without what a comment says."""
    assert ["train", "recipes/digits.toml"] in commands(DOCS.parent / "README.md")
    assert ["train", "recipes/digits.toml"] in commands(DOCS / "first-ten-minutes.md")


@pytest.mark.stress
def test_the_script_for_ssh_trains_on_two_hosts(tmp_path: Path) -> None:
    """Both are this machine, reached by a program that stands in for ssh."""
    own = project(tmp_path)
    (script,) = blocks("several-machines", "bash")
    (tmp_path / "start.sh").write_text(
        script.replace("(n1 n2)", "(127.0.0.1 127.0.0.1)").replace("RUN.toml", "run.toml")
    )
    (tmp_path / "bin").mkdir()
    shoal = f'#!/bin/sh\nexec {sys.executable} -m shoal "$@"\n'
    for name, text in (("ssh", '#!/bin/sh\nshift 2\nexec sh -c "$*"\n'), ("shoal", shoal)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environ = own.environ(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "start.sh"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(own.losses()) == list(range(1, 10))
    assert len(list((tmp_path / "runs/own/events").iterdir())) == 4


USERS_FILES = {"mine.py", "own.py", "script.py", "train.py", "my_training.py", "plain.py", "model.py", "other.py"}
"""Names that texts give to a reader's files, beside SCRIPT.py and the like."""
OF_OTHERS = {"theoretical_memory_usage.py", "zero_to_fp32.py", "file.py"}


def test_files_that_texts_name_are_there() -> None:
    """In docstrings, comments and pages; decisions tell of their time."""
    root = DOCS.parent
    texts = [*(root / "src").rglob("*.py"), *DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    known = {
        path.name for folder in ("src", "tests", "benchmarks", "recipes") for path in (root / folder).rglob("*.py")
    }
    lost = []
    for path in texts:
        for name in re.findall(r"(?<![\w/.*])((?:\w+/)*[a-z]\w*\.py)\b", path.read_text(encoding="utf-8")):
            places = [root, root / "src/shoal", root / "tests", path.parent]
            there = any((place / name).exists() for place in places) or ("/" not in name and name in known)
            if not there and "decisions" not in path.parts and Path(name).name not in USERS_FILES | OF_OTHERS:
                lost.append(f"{path.relative_to(root)}: {name}")
    assert lost == []


def test_the_support_matrix_names_tests_that_are_there() -> None:
    text = (DOCS / "support-matrix.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert named
    assert [name for name in named if not (DOCS.parent / name).exists()] == []
