"""PyTorch's own `DistributedTest` classes: what passes on Gloo passes on Shoal's backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

APART = {
    "test_Backend_enum_class": "it asks for the name of a backend that PyTorch knows itself",
    "test_backend_apis": "the same",
}
"""Tests of the name rather than of the backend."""


def outcomes(backend: str, names: list[str], folder: Path) -> dict[str, str]:
    """What became of each of the tests on `backend`; no names mean all."""
    chosen, out = folder / "names.json", folder / f"{backend}.json"
    chosen.write_text(json.dumps(names))
    (folder / backend).mkdir()
    environ = {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": "2",
        "TEMP_DIR": str(folder / backend),
        "LOGLEVEL": "ERROR",
    }
    subprocess.run([sys.executable, "-m", "tests.distributed_suite", str(chosen), str(out)], env=environ, check=True)
    return json.loads(out.read_text())


@pytest.mark.stress
@pytest.mark.timeout(5400)
def test_what_passes_on_gloo_passes_here(tmp_path: Path) -> None:
    gloo = outcomes("gloo", [], tmp_path)
    passed = sorted(name for name, how in gloo.items() if how == "passed" and name not in APART)
    assert len(passed) >= 80, "most of PyTorch's tests need no GPU"
    ours = outcomes("shoal", passed, tmp_path)
    assert {name: how for name, how in ours.items() if how != "passed"} == {}
