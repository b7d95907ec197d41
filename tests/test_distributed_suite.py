"""PyTorch's own `DistributedTest` classes: what passes on Gloo passes on Shoal's backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLICES = 8
FEWEST = 5
"""Tests of each slice that pass on Gloo, of about 36: most of PyTorch's need a GPU, another backend or three ranks. The
fourth slice has six."""
TEST_S = 100
"""A test that takes longer has failed; most take one or two seconds."""
OF_GLOO_BY_NAME = {"test_get_backend", "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"}
"""They ask that `get_backend` says "gloo", or `dist.monitored_barrier` asks so: it refuses all other backends. The
group's own `monitored_barrier` works (`tests/test_c10d_ends.py`)."""


def outcomes(backend: str, names: list[str], folder: Path, *, size: int) -> dict[str, str]:
    """What became of each of the tests on `size` ranks of `backend`."""
    chosen, out = folder / "names.json", folder / f"{backend}.json"
    chosen.write_text(json.dumps(names))
    (folder / backend).mkdir()
    environ = {
        **os.environ,
        "OPENED": backend,
        "BACKEND": "gloo",
        "WORLD_SIZE": str(size),
        "TEMP_DIR": str(folder / backend),
        "LOGLEVEL": "ERROR",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_S),
    }
    subprocess.run([sys.executable, "-m", "tests.distributed_suite", str(chosen), str(out)], env=environ, check=True)
    return json.loads(out.read_text())


def names_of_tests(folder: Path) -> list[str]:
    """All of PyTorch's, in their order."""
    out = folder / "all.json"
    environ = {**os.environ, "OPENED": "gloo", "BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": str(folder)}
    subprocess.run([sys.executable, "-m", "tests.distributed_suite", "--list", str(out)], env=environ, check=True)
    return json.loads(out.read_text())


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("size", [2, 4])
def test_what_passes_on_gloo_passes_here(size: int, part: int, tmp_path: Path) -> None:
    """An eighth of the tests, on two ranks and on four."""
    gloo = outcomes("gloo", names_of_tests(tmp_path)[part::SLICES], tmp_path, size=size)
    passed = sorted(name for name, how in gloo.items() if how == "passed" and name not in OF_GLOO_BY_NAME)
    assert len(passed) >= FEWEST
    ours = outcomes("shoal", passed, tmp_path, size=size)
    assert {name: how for name, how in ours.items() if how != "passed"} == {}
