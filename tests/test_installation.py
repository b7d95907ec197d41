"""The command that adds an optional part works where Shoal came from, whatever that is."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import MissingExtra
from shoal.installation import hidden_package, install_command, requirement, source_tree

COMMIT = "0123456789abcdef"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "'shoal[page]'"),
        ({"url": "file:///home/me/my%20shoal", "dir_info": {}}, "'/home/me/my shoal[page]'"),
        (
            {"url": "https://host/shoal.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"'shoal[page] @ git+https://host/shoal.git@{COMMIT}'",
        ),
        (
            {"url": "file:///wheels/shoal-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'shoal[page] @ file:///wheels/shoal-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_the_requirement_is_where_shoal_came_from(origin: dict[str, Any] | None, expected: str) -> None:
    """An index, a folder, a repository at its commit, an archive."""
    assert requirement("page", source_tree=None, origin=origin) == expected


def test_a_source_tree_is_installed_in_place(tmp_path: Path) -> None:
    """Where the package lies in `src` beside a pyproject.toml; a copy in site-packages has none."""
    package = tmp_path / "it's here/src/shoal"
    package.mkdir(parents=True)
    assert source_tree(package) is None
    (tmp_path / "it's here/pyproject.toml").touch()
    tree = source_tree(package)
    assert tree == tmp_path / "it's here"
    quoted = requirement("page", source_tree=tree, origin=None).removeprefix("-e ")
    shown = subprocess.run(["sh", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{tree}[page]"


def test_pip_takes_what_a_missing_extra_names() -> None:
    """The folder in the command is that of this project, and the extra one of its own."""
    said = str(MissingExtra("uvicorn", extra="page", purpose="shoal watch"))
    assert said == f"shoal watch needs the package 'uvicorn': {install_command('page')}"
    named = said.partition("-e '")[2].rstrip("'")
    project = tomllib.loads((Path(named.removesuffix("[page]")) / "pyproject.toml").read_text())
    assert project["project"]["name"] == "shoal"
    assert "page" in project["project"]["optional-dependencies"]


def test_the_command_costs_nothing_before_it_is_needed() -> None:
    """Errors are imported by every command; the search for installed packages is not."""
    code = "import sys, shoal.errors; print('importlib.metadata' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_file_that_hides_a_package_is_named(tmp_path: Path) -> None:
    """The first on the path counts: a module of that name behind the package hides nothing, nor does a package."""
    (tmp_path / "torch.py").write_text("raise ImportError('this is not torch')")
    said = hidden_package([str(tmp_path), *sys.path])
    assert said is not None
    assert f"{tmp_path / 'torch.py'} has the name of the package torch" in said
    assert hidden_package([*sys.path, str(tmp_path)]) is None
    (tmp_path / "torch.py").unlink()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    assert hidden_package([str(tmp_path), *sys.path]) is None


@pytest.mark.parametrize(
    ("arguments", "code"), [(["-m", "shoal", "train", "run.toml"], 2), (["-c", "import shoal; shoal.train"], 1)]
)
def test_shoal_beside_a_hidden_package_says_so(arguments: list[str], code: int, tmp_path: Path) -> None:
    """The command in one sentence; a script in the last line of its traceback, where it first uses Shoal."""
    (tmp_path / "torch.py").touch()
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code == 1)
    assert "torch.py has the name of the package torch, and Python would import it" in done.stderr.splitlines()[-1]
