"""The tested range of torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from shoal.launcher import versions
from shoal.launcher.versions import check_torch_version, require_tested_torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1a0+git123"])
def test_the_tested_range_is_accepted(version):
    """From 2.11 to before 2.14, local builds included."""
    assert require_tested_torch(version) == version


@pytest.mark.parametrize("version", ["2.10.9", "2.14.0", "2.14.0a0", "3.12.0", "1.12.0", "nightly", None])
def test_anything_else_is_refused_with_the_repair(version):
    """What was found, the range, and the command that repairs it."""
    with pytest.raises(EnvironmentFault, match=r"torch>=2\.11,<2\.14; pip install 'torch"):
        require_tested_torch(version)


def test_the_range_is_the_packages_own():
    """pyproject.toml and the check cannot drift apart, in torch, Python and the extras alike."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low, high = versions.TORCH_FROM, versions.TORCH_BELOW
    assert f"torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}" in project["dependencies"]
    assert project["requires-python"] == f">={versions.PYTHON_FROM[0]}.{versions.PYTHON_FROM[1]}"
    extras = project["optional-dependencies"]
    assert set(versions.EXTRAS) == set(extras) - {"dev"}
    assert all(any(line.startswith(package) for line in extras[extra]) for extra, package in versions.EXTRAS.items())


def test_the_check_and_the_whole_launcher_import_no_torch():
    """The launcher starts ranks before torch could even be read from disk."""
    script = """
import sys
import shoal.launcher.doctor, shoal.launcher.lock, shoal.launcher.spawn
from shoal.launcher.versions import check_torch_version
print(check_torch_version(), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [check_torch_version(), "False"]
