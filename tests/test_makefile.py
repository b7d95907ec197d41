"""`make` installs what a target needs, once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the rules of installation look at, with an environment that has pip and nothing else."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    return tmp_path


def commands(folder: Path, target: str) -> list[str]:
    """What `make` would run, without running it."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "-n", target], cwd=folder, env=bare, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def installed(folder: Path, target: str) -> list[str]:
    """The requirements that `target` would install."""
    return [line.split(" -e ")[1] for line in commands(folder, target) if "pip install" in line]


def stamp(folder: Path, target: str) -> None:
    """Touches what `make` would touch at the end of the installation."""
    touched = [line.split()[1:] for line in commands(folder, target) if line.startswith("touch ")]
    for name in [name for names in touched for name in names]:
        (folder / name).touch()


def test_the_demo_installs_the_base_only(clone: Path) -> None:
    """No extra, and nothing compiled that is never imported; tests and checks install the rest."""
    assert installed(clone, "demo") == ["."]
    assert installed(clone, "test") == installed(clone, "check") == ["'.[vision,dev]'"]


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_a_second_start_installs_nothing(clone: Path, target: str) -> None:
    """The stamp is newer than what it depends on; the whole installation holds the base."""
    stamp(clone, target)
    assert installed(clone, target) == []
    assert (installed(clone, "demo"), bool(installed(clone, "test"))) == ([], target == "demo")
