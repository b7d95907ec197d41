"""Commands that are forks of this process, which has imported torch: they do what a start of their own does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  what a fork brings along

import shoal
from shoal.launcher import warm
from tests.waiting import HANG_S

SHOAL = [sys.executable, "-m", "shoal"]


def started(command: list[str], folder: Path, **env: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command in `folder`, whose ranks are forks too."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = warm.start(command, env={**os.environ, warm.WARM: "1", **env}, stdout=out, stderr=err)
        code = process.wait(HANG_S)
    return code, (folder / "out").read_text(), (folder / "err").read_text()


def test_a_fork_has_the_arguments_streams_and_exit_code_of_its_command(tmp_path: Path) -> None:
    assert started([*SHOAL, "--version"], tmp_path) == (0, f"shoal {shoal.__version__}\n", "")
    code, said, error = started([*SHOAL, "train", str(tmp_path / "nowhere.toml")], tmp_path)
    assert (code, said) == (2, "")
    assert "nowhere.toml is missing" in error


def test_a_fork_imports_nothing_again(tmp_path: Path) -> None:
    """It is made in the time of a fork: an environment in which Python finds no module does not hinder it."""
    code, said, error = started([*SHOAL, "--version"], tmp_path, PYTHONHOME="/nowhere", PYTHONPATH="/nowhere")
    assert (code, said) == (0, f"shoal {shoal.__version__}\n"), error
    real = subprocess.run([*SHOAL, "--version"], env={**os.environ, "PYTHONHOME": "/nowhere"}, capture_output=True)
    assert real.returncode != 0


def test_a_fork_closes_what_it_was_not_given(tmp_path: Path) -> None:
    """The lock of the sweep that starts it, for one; and it lets `subprocess` go on at once."""
    read_end, write_end = os.pipe()
    with (tmp_path / "out").open("wb") as out:
        process = warm.start([*SHOAL, "--version"], env={**os.environ, warm.WARM: "1"}, stdout=out, stderr=out)
    os.close(write_end)
    assert os.read(read_end, 1) == b"", "the fork holds no copy of the other end when it has begun"
    os.close(read_end)
    assert process.wait(HANG_S) == 0


@pytest.mark.parametrize("command", [["true"], [sys.executable, "-c", "import sys; sys.exit('torch' in sys.modules)"]])
def test_what_is_not_shoals_own_is_started_as_ever(command: list[str], tmp_path: Path) -> None:
    assert not warm.may_fork(command)
    assert started(command, tmp_path)[0] == 0
    assert warm.may_fork([*SHOAL, "train"])
